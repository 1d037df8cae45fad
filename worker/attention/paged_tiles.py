"""How a batch of paged attention is cut into tiles and splits, by rule from its host bounds."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from worker.forward.batch import SHORT_KEYS, Bounds
from worker.ops.jit import power_of_two

MAX_SPLITS = 64
MAX_BLOCK = 64  # keys that one step of the loop loads, at most
_TILE_BYTES = 16384  # of keys that one step of the loop loads; as many of values


class Chip(NamedTuple):
    """What a GPU has."""

    num_sms: int
    has_room: bool = True  # an SM: 228 KiB of shared memory, for larger tiles of heads of 256


@dataclass(frozen=True, slots=True)
class PagedTiles:
    """How batches of one padded shape are cut into tiles and splits, and upper bounds of both."""

    block_m: int
    block_n: int
    rows: int  # of a tile that can be used
    max_tiles: int  # of one request
    max_items: int  # of the batch
    programs: int
    num_warps: int
    num_stages: int = 3
    max_splits: int = 1  # of one tile
    shortest: int = 1  # keys that are worth a split of their own
    most: int = 1  # splits of a tile, however long
    max_registers: int | None = None  # of a thread; None = the compiler decides
    early: bool = False  # start while the kernel before it still ends
    longest_first: bool = False  # requests with more keys are listed first


@lru_cache(4096)
def choose(
    bounds: Bounds, heads: tuple[int, int], head_dim: int, item_bytes: int, chip: Chip
) -> PagedTiles:
    """The tiles for a batch's bounds and its (query, kv) heads, by rule and without a search.

    `max_seq_len` limits how many splits there can be, not where they lie. So a bound that is too
    high changes no result, except that prompts over at most SHORT_KEYS keys may get smaller tiles.
    A long row gets several splits in any decode batch, so that the other rows do not wait for it.
    """
    num_reqs, num_tokens, max_query_len, max_seq_len = bounds
    num_sms, has_room = chip
    group = heads[0] // heads[1]
    rows = max_query_len * group
    widest = 32 if item_bytes > 2 else 128 if has_room or head_dim <= 128 else 64
    highest = min(max(16, power_of_two(rows)), widest)
    # Small tiles read the keys more often, which costs little while there are few keys, and they
    # fill the device: 64 tokens alone take 3.9 us a layer in tiles of 16 rows, 5.9 in tiles of 128.
    lowest, wanted = highest, num_sms // (4 * heads[1])
    if max_query_len >= 16 and max_seq_len <= SHORT_KEYS:
        lowest, wanted = 16, 7 * num_sms // (8 * heads[1])
    elif head_dim > 128 and highest == 128:
        lowest = 64
    block_m, max_tiles, tiles = _tiles(num_reqs, rows, num_tokens * group, highest, lowest, wanted)
    programs, few_rows = tiles * heads[1], rows <= 64
    shortest, most = _splits(programs, few_rows, num_reqs, num_sms)
    # Heads of 256, 128 tokens of 16 heads behind 8064 for 2 of keys: tiles of 64 rows and keys take
    # 73 us, of 128 rows by 32 keys 85; 512 tokens behind 8192 215 and 189.
    is_square = block_m == 64 and head_dim > 128 and has_room and not few_rows
    block_n = MAX_BLOCK if is_square else min(MAX_BLOCK, _TILE_BYTES // (head_dim * item_bytes))
    # An SM holds three programs, or four with half the keys a step and fewer registers. Four pay
    # where all programs then run at once: 512 programs take 40.4 us a layer instead of 44.7.
    one_wave = block_m == 16 and 3 * num_sms < programs <= 4 * num_sms
    if one_wave:
        block_n = min(block_n, 32)
        # A long row would run on alone. 512 programs over 736 keys on average, 1636 at most, take
        # 75.9 us on an H100 with 1408, 72.5 so and sorted; over 4096 alike 368 instead of 365.
        shortest = min(shortest, 1024)
    max_splits = max(1, min(most, -(-max_seq_len // shortest)))
    return PagedTiles(
        block_m=block_m,
        block_n=block_n,
        # Prompts use all rows: otherwise lengths below a tile would need kernels of their own.
        rows=block_m if max_query_len > 1 else min(rows, block_m),
        max_tiles=max_tiles,
        max_splits=max_splits,
        max_items=tiles * max_splits,
        shortest=shortest,
        most=most,
        programs=min(programs * max_splits, 16 * num_sms),
        num_warps=4 if block_m * head_dim <= 8192 or is_square else 8,
        max_registers=128 if one_wave else None,
        # Programs that start early spread unevenly over the SMs: 256 take 28 us a layer instead of
        # 23. Up to one program an SM, and with 512 and more, an early start gains 0.7 us.
        early=programs <= num_sms or programs > 3 * num_sms,
        # Where they do not all run at once. Rows of a served load on an H100, as they come and so:
        # 1024 programs 135.8 and 127.6 us; but 256, which run at once, 41.7 and 43.5.
        longest_first=max_tiles == 1 and programs > 3 * num_sms,
    )


def _splits(programs: int, few_rows: bool, num_reqs: int, num_sms: int) -> tuple[int, int]:
    """(keys that are worth a split of their own, most splits of a tile) for so many (tile, head).

    The figures are microseconds a layer, on an H200 where no other card is named.
    """
    if few_rows:
        # As many as fill the SMs once, with three programs an SM, or else twice: 12
        # at least, so that a long row among short ones is not computed for longer than those. On
        # an H100, 32768 keys: 16 programs take 97 in 24 splits, 106 in 16 and 94 in 8; 32 programs
        # 180 in 12, 195 in 16; 64 programs 351 in 12, 349 in 6. Very few programs are enough with
        # one an SM: 8 take 53 in 16, 55 in 24 and 61 in 32, as all are added up in the end.
        once, twice = 3 * num_sms // programs, 2 * 3 * num_sms // programs
        most = once if once >= 12 else max(min(twice, 16), 8 if programs > num_sms else 1)
        most = min(most, 16 if 12 * programs <= num_sms else 24)
    elif num_reqs == 1:
        # An SM holds one program of 128 rows: 128 tokens of 32 heads behind 2048 for 8 of keys take
        # 25 in 4 splits, which run at once, and 66 in 17; 1024 behind 16384 663 in 1, 926 in 3.
        most = min(max(1, num_sms // programs), MAX_SPLITS)
    else:
        most = min(-(-4 * num_sms // programs), MAX_SPLITS)
    # 576 keys, unsplit and in splits of 320, 192 and 128: 8 programs 11.5, 9.1, 7.4, 7.2;
    # 64 programs 12.4, 10.9, 10.9, 12.4; 128 programs 13.9, 18.7, 15.8, 19.1.
    if 3 * programs <= num_sms:
        return 128, most
    if 2 * programs <= num_sms:
        return 256, most
    # 256 programs take 252 over 8192 keys in 6 splits, 256 in 8; 512 over 4096 251 in 3, 254 in 4.
    return (1408 if few_rows else 1024), most


def _tiles(
    num_reqs: int, rows: int, all_rows: int, highest: int, lowest: int, wanted: int
) -> tuple[int, int, int]:
    """(rows of a tile, most tiles of a request, most tiles of the batch).

    Halves the tile from `highest` rows down until there are `wanted` tiles or `lowest` is reached.
    """
    block_m = highest
    while True:
        max_tiles = -(-rows // block_m)
        tiles = min(num_reqs * max_tiles, -(-all_rows // block_m) + num_reqs)
        if tiles >= wanted or block_m == lowest:
            return block_m, max_tiles, tiles
        block_m //= 2
