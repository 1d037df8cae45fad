"""Rows of a tier by themselves: every byte of a page, budgets, what is torn and not believed."""

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from prometheus_client import generate_latest

from cluster.clients import cache
from tests.support.books import check_book
from tests.support.engines import value
from tests.support.patience import until
from worker.cache.book import PageBook
from worker.cache.eight_bits import fill_noise
from worker.cache.layout import KVLayout, KVRegion, StateRegion
from worker.cache.pool import KVPool
from worker.observe.metrics import WorkerMetrics
from worker.plan import Chunk, Plan, RowPages
from worker.transfer.tier import directory
from worker.transfer.tier.ahead import CopyAhead
from worker.transfer.tier.arena import Arena
from worker.transfer.tier.directory import Directory, in_blocks
from worker.transfer.tier.objects import (
    Corrupt,
    Form,
    Source,
    first_key,
    key_of,
    next_key,
    part_key,
)
from worker.transfer.tier.ranks import Keep, Loaded, LoadPages, RankTier
from worker.transfer.tier.rows import Copy, Load, Row
from worker.transfer.tier.tier import Tier

CPU = torch.device("cpu")
PAGE = 16
STATE = StateRegion(2, 2, 2, 8, 8, "float32")
TOKENS = tuple(range(PAGE))


def layout(dtype: str = "bfloat16") -> KVLayout:
    """With a drafter's regions, and a state."""
    target = KVRegion("target", 4, 2, 64, 2, PAGE, dtype)
    draft = KVRegion("draft", 1, 2, 64, 1, PAGE, "bfloat16")
    tail = KVRegion("tail", 1, 1, 96, 1, PAGE, "bfloat16", parts=1, rows="page")
    return KVLayout((target, draft, tail), STATE)


def form_of(pool: KVPool) -> Form:
    return Form("0123456789abcdef", 0, 1, PAGE, pool.layout.page_bytes, STATE.slot_bytes)


Make = Callable[[Form], Arena | Directory]


@pytest.fixture(params=["host", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A store with room for eight objects."""

    def made(form: Form) -> Arena | Directory:
        most = 8 * in_blocks(form.object_bytes)
        if request.param == "host":
            return Arena(most, form.object_bytes, registered=False)
        return Directory(tmp_path / "tier", form, most)

    return made


@pytest.fixture
def pool() -> Iterator[KVPool]:
    made = noisy(layout())
    yield made
    made.close()


def noisy(of: KVLayout, device: torch.device = CPU) -> KVPool:
    made = KVPool(of, 24, device, (3, 2))
    for view in (*made.caches(), *(part for pair in made.states for part in pair)):
        fill_noise(view)
    return made


def row_of(pool: KVPool, make: Make) -> Row:
    form = form_of(pool)
    metrics = WorkerMetrics(model="m", role="decode", worker="w")
    row = Row("host", lambda: make(form), 1e12, pool, form, metrics)
    until(lambda: row._store is not None)
    return row


def bytes_of(pool: KVPool, place: int, part: int = -1) -> bytes:
    if part >= 0:
        return pool.slot(place).cpu().numpy().tobytes()
    return b"".join(groups[:, place].cpu().numpy().tobytes() for groups in pool._pages)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_every_byte_of_a_page_and_of_a_snapshot_comes_back(dtype: str, make: Make) -> None:
    """Laws 3, 8 and 9: a drafter's regions and exponents too, onto pages that were poisoned."""
    check_bytes(noisy(layout(dtype)), make)


def check_bytes(pool: KVPool, make: Make) -> None:
    row, form = row_of(pool, make), form_of(pool)
    page, state = bytes_of(pool, 3), bytes_of(pool, 4, 0)
    others = bytes_of(pool, 6) + bytes_of(pool, 8)
    mark, key = object(), next_key(first_key("x", ""), TOKENS)
    watched: dict[int, object] = {3: mark, 4: mark}
    sources = [Source(key, TOKENS, 3)]
    sources += [Source(part_key(key, i), TOKENS, 4, i) for i in range(form.num_parts)]
    for source in sources:
        row.offer(Copy(source, watched, mark))
    until(lambda: row.idle)
    for place in (3, 7):
        for groups in pool._pages:
            groups[:, place].fill_(0xFF)
    for slot in (2, 4):
        pool.slot(slot).fill_(0xFF)
    load = Load([(row, s._replace(place=7 if s.part < 0 else 2)) for s in sources])
    row.load(load)
    until(lambda: load.is_over)
    assert (load.cause, load.num_loaded) == ("", 1 + form.num_parts)
    assert bytes_of(pool, 7) == page
    assert bytes_of(pool, 2, 0) == state
    assert bytes_of(pool, 6) + bytes_of(pool, 8) == others, "a neighbour was written"
    row.close()
    pool.close()


def test_a_store_holds_its_budget_and_the_least_recently_used_goes(
    pool: KVPool, make: Make
) -> None:
    row = row_of(pool, make)
    keys = [bytes([i]) * 32 for i in range(12)]
    for number, key in enumerate(keys):
        mark = object()
        row.offer(Copy(Source(key, TOKENS, 1 + number), {1 + number: mark}, mark))
        until(lambda: row.idle)
        if row.has(keys[0]):  # is used each time
            load = Load([(row, Source(keys[0], TOKENS, 20))])
            row.load(load)
            until(lambda load=load: load.is_over)
            assert load.num_loaded == 1
    assert [i for i, key in enumerate(keys) if row.has(key)] == [0, 5, 6, 7, 8, 9, 10, 11]
    store = row._store
    assert store is not None
    assert store.num_bytes == 8 * in_blocks(form_of(pool).object_bytes)
    if isinstance(store, Directory):
        sizes = [in_blocks(path.stat().st_size) for path in store._own.iterdir()]
        assert sum(sizes) == store.num_bytes
    row.forget()
    assert not any(map(row.has, keys))
    until(lambda: row.idle)
    assert not any(map(row.has, keys))
    assert store.num_bytes == 0
    row.close()


def test_what_was_freed_while_it_was_copied_is_torn(pool: KVPool, make: Make) -> None:
    """Law 4, at the allocator: whoever frees a page takes its mark out."""
    book = PageBook(24, PAGE)
    row = row_of(pool, make)
    hold = book.open(range(40), 40, max_matched=0)
    assert hold is not None
    book.bind(hold, 40)
    book.commit(hold, range(40))
    node = hold.nodes[0]
    mark = book.watched[node.page] = object()
    source = Source(key_of(node, "x"), TOKENS, node.page)
    book.close(hold)
    row.offer(Copy(source, book.watched, mark))
    until(lambda: row.idle)
    assert row.has(source.key)
    row.forget()
    until(lambda: row.idle)
    book.forget()
    row.offer(Copy(source, book.watched, mark))
    until(lambda: row.idle)
    assert not row.has(source.key)
    mark, store = object(), row._store
    marks: dict[int, object] = {3: mark}
    assert store is not None
    put = store.put
    store.put = lambda key, fill: not marks.clear() and put(key, fill)  # type: ignore[method-assign]
    row.offer(Copy(source._replace(place=3), marks, mark))
    until(lambda: row.idle)
    assert not row.has(source.key), "freed while it was copied"
    row.close()


def test_a_key_is_of_layout_salt_and_all_tokens_before() -> None:
    book = PageBook(24, PAGE)
    keys = set()
    for salt in ("", "a"):
        for first in (0, 1):
            hold = book.open([first, *range(1, 40)], 40, max_matched=0, salt=salt)
            assert hold is not None
            book.bind(hold, 40)
            book.commit(hold, [first, *range(1, 40)])
            key = first_key("x", salt)
            for node in hold.nodes:
                tokens = [first, *range(1, 40)][(node.depth - 1) * PAGE : node.depth * PAGE]
                key = next_key(key, tokens)
                assert key == key_of(node, "x")
                keys.add(key)
            book.close(hold)
    assert len(keys) == 8
    assert first_key("x", "a") != first_key("y", "a")


def test_nothing_is_believed_of_an_object(pool: KVPool) -> None:
    form = form_of(pool)
    view = memoryview(bytearray(os.urandom(form.object_bytes)))
    key = b"k" * 32
    form.seal(view, key, TOKENS, 1)
    assert form.body(view, key, TOKENS) == view[form.header_bytes :]
    for wrong in (
        lambda: form.body(view, b"l" * 32, TOKENS),
        lambda: form.body(view, key, TOKENS[::-1]),
        lambda: form.body(view[:-1], key, TOKENS),
        lambda: form._replace(rank=1).body(view, key, TOKENS),
        lambda: form._replace(layout_hash="other").body(view, key, TOKENS),
    ):
        with pytest.raises(Corrupt):
            wrong()
    for at in (0, 9, 45, 60, 70, 72, form.header_bytes, form.object_bytes - 1):
        view[at] ^= 1
        with pytest.raises(Corrupt):
            form.body(view, key, TOKENS)
        view[at] ^= 1


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        Directory(tmp_path / "open", Form("me", 0, 1, PAGE, 64, 0), 1 << 20)


def test_stores_of_several_processes_keep_to_one_budget(
    pool: KVPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although neither looks, and knows what the others have written or removed."""
    monkeypatch.setattr(directory, "LOOK_S", 3600.0)
    form, root = form_of(pool), tmp_path / "tier"
    size, rng = in_blocks(form.object_bytes), random.Random(0)
    stores = [Directory(root, form._replace(layout_hash=of), 8 * size) for of in "aab"]

    def taken() -> int:
        return sum(in_blocks(path.stat().st_size) for path in root.glob("*/*"))

    for number in range(60):
        rng.choice(stores).put(number.to_bytes(32), lambda view: True)
        assert taken() <= 8 * size
        if number % 7 == 0:
            rng.choice(stores).forget((number - 2).to_bytes(32) if number else b"")
    assert taken() == 8 * size
    for path in [*root.glob("*/*")][::2]:  # by a person
        path.unlink()
    stores[0]._look()
    assert stores[0]._ledger.read()[0] == taken() == stores[0].num_bytes
    with pytest.raises(OSError, match="no object fits"):
        Directory(tmp_path / "small", form, size - 1).put(b"k" * 32, lambda view: True)


def test_files_of_another_length_and_strangers_harm_nobody(pool: KVPool, tmp_path: Path) -> None:
    form = form_of(pool)
    own = tmp_path / "tier" / form.owner
    own.mkdir(mode=0o700, parents=True)
    (tmp_path / "tier").chmod(0o700)
    key = b"k" * 32
    (own / f"{key.hex()}.kv").write_bytes(b"short")
    (own / "stranger.kv").write_bytes(b"x")
    (own / ".begun-1-0").write_bytes(b"x")
    os.utime(own / ".begun-1-0", (1, 1))
    store = Directory(tmp_path / "tier", form, 1 << 30)
    assert store.exists(key)
    assert not (own / ".begun-1-0").exists()
    with pytest.raises(Corrupt):
        store.get(key, lambda view: None)
    store.forget(key)
    with pytest.raises(KeyError):
        store.get(key, lambda view: None)
    store.close()


def test_a_cancelled_load_writes_no_page_though_its_store_wakes(pool: KVPool, make: Make) -> None:
    """Law 5: FAILED only when nothing is written any more; that is at once where a store hangs."""
    row = row_of(pool, make)
    mark = object()
    source = Source(b"k" * 32, TOKENS, 3)
    row.offer(Copy(source, {3: mark}, mark))
    until(lambda: row.idle)
    store, goes_on, asked = row._store, threading.Event(), threading.Event()
    assert store is not None
    get = store.get

    def hangs(key: bytes, take: Callable[[memoryview], None]) -> None:
        asked.set()
        assert goes_on.wait(60)
        get(key, take)

    store.get = hangs  # type: ignore[method-assign]
    before = bytes_of(pool, 9)
    load = Load([(row, source._replace(place=9))])
    row.load(load)
    assert asked.wait(60)
    load.cut("late")
    assert load.is_over
    goes_on.set()
    until(lambda: row.idle)
    assert bytes_of(pool, 9) == before
    row.close()


def test_pages_in_front_of_what_is_missing_count_whatever_comes_first(
    pool: KVPool, make: Make
) -> None:
    """Runs come in any order: those in front of a failure, in its own run too, none behind it."""
    row = row_of(pool, make)
    keys = [bytes([i]) * 32 for i in range(7)]
    for number in (0, 1, 2, 4, 5, 6):
        mark = object()
        row.offer(Copy(Source(keys[number], TOKENS, 1 + number), {1 + number: mark}, mark))
    until(lambda: row.idle)
    store, missed = row._store, threading.Event()
    assert store is not None
    get = store.get

    def late(key: bytes, take: Callable[[memoryview], None]) -> None:
        if key == keys[3]:
            missed.set()
        assert key in keys[2:4] or missed.wait(60)
        get(key, take)

    store.run = min(store.run, 2)
    store.get = late  # type: ignore[method-assign]
    load = Load([(row, Source(key, TOKENS, 10 + i)) for i, key in enumerate(keys)])
    row.load(load)
    until(lambda: load.is_over and row.idle)
    assert (load.num_loaded, load.cause) == (3, "absent")
    assert [bytes_of(pool, 10 + i) == bytes_of(pool, 1 + i) for i in range(3)] == [True] * 3
    row.close()


def test_a_load_goes_on_from_row_to_row(pool: KVPool, make: Make) -> None:
    """Each brings its own parts, in runs that end where another's begin."""
    rows, marks = [row_of(pool, make) for _ in range(2)], dict.fromkeys(range(1, 8), object())
    owners = [rows[i] for i in (0, 0, 0, 1, 1, 0, 1)]
    sources = [Source(bytes([i]) * 32, TOKENS, 1 + i) for i in range(len(owners))]
    for row, source in zip(owners, sources, strict=True):
        row.offer(Copy(source, marks, marks[1]))
    until(lambda: all(row.idle for row in rows))
    parts = [source._replace(place=10 + i) for i, source in enumerate(sources)]
    load = Load([*zip(owners, parts, strict=True)])
    rows[0].load(load)
    until(lambda: load.is_over)
    assert (load.num_loaded, load.cause) == (7, "")
    assert all(bytes_of(pool, 10 + i) == bytes_of(pool, 1 + i) for i in range(7))
    for row in rows:
        row.close()


def test_a_load_is_over_when_nothing_is_written_any_more(pool: KVPool, make: Make) -> None:
    row, seen = row_of(pool, make), list[tuple[int, bool]]()
    load = Load([(row, Source(b"k" * 32, TOKENS, place)) for place in (3, 4)])

    def write(num: int) -> None:
        load.cut("late")
        seen.append((num, load.is_over))

    load.cut("absent", 1)
    load.write(range(2), write)
    load.write(range(1, 2), write)
    assert (seen, load.is_over, load.num_loaded, load.cause) == ([(1, False)], True, 1, "late")
    row.close()


def tier_of(pool: KVPool, row: Row, book: PageBook) -> Tier[str]:
    ahead = CopyAhead(book, form_of(pool), [row], row.metrics, lambda order: None, lambda: 0)
    return Tier(ahead, lambda: 1.0)


def kept_text(tier: Tier[str], row: Row, tokens: Sequence[int], *, forget: bool = True) -> None:
    """Have a text's pages copied, as after a request, and then evicted."""
    hold = tier.book.open(tokens, len(tokens), max_matched=len(tokens) - 1)
    assert hold is not None
    tier.book.bind(hold, len(tokens))
    tier.book.commit(hold, tokens)
    tier.book.close(hold)
    tier.tend()
    until(lambda: row.idle)
    if forget:
        tier.book.forget()


def test_a_load_writes_to_no_page_that_a_step_may_read(pool: KVPool, make: Make) -> None:
    """Law 2: freed pages cool until the last step launched before has settled."""
    row, book, text = row_of(pool, make), PageBook(6, PAGE), [*range(3 * PAGE)]
    tier = tier_of(pool, row, book)
    kept_text(tier, row, text)
    book.launched(1)
    kept_text(tier, row, [7] * (5 * PAGE))  # all pages cool
    hold = book.open(text, len(text), max_matched=len(text) - 1)
    assert hold is not None
    assert tier.begin("a", hold, text, len(text) - 1)
    assert tier.poll(0.0) == []
    assert not hold.private
    book.settled(1)
    until(lambda: bool(tier.poll(0.0)) or not tier.loads)
    assert hold.num_matched == 2 * PAGE
    check_book(book, [hold])
    book.close(hold)
    tier.close()


def test_the_same_prefix_may_come_by_another_way_meanwhile(pool: KVPool, make: Make) -> None:
    """Law 6: who has it first keeps it, and the other's pages stay its own."""
    row, book, text = row_of(pool, make), PageBook(24, PAGE), [*range(3 * PAGE)]
    tier = tier_of(pool, row, book)
    kept_text(tier, row, text)
    holds = [book.open(text, len(text), max_matched=len(text) - 1) for _ in range(2)]
    first, second = (hold for hold in holds if hold is not None)
    assert tier.begin("a", first, text, len(text) - 1)
    book.bind(second, len(text))
    book.commit(second, text)
    until(lambda: bool(tier.poll(0.0)) or not tier.loads)
    check_book(book, [first, second])
    assert first.num_matched == 2 * PAGE
    assert set(first.pages) == first.private
    assert not set(first.pages) & set(second.pages)
    book.close(second)
    book.close(first)
    check_book(book, [])
    tier.close()


@pytest.mark.parametrize("salt", ["", "b"])
def test_a_text_is_found_under_its_own_salt_alone(salt: str, pool: KVPool, make: Make) -> None:
    """Law 11."""
    row, book, text = row_of(pool, make), PageBook(24, PAGE), [*range(3 * PAGE)]
    tier = tier_of(pool, row, book)
    kept_text(tier, row, text)
    hold = book.open(text, len(text), max_matched=len(text) - 1, salt=salt)
    assert hold is not None
    assert tier.begin("a", hold, text, len(text) - 1) == (not salt)
    tier.cancel("a")
    until(lambda: bool(tier.poll(0.0)) or not tier.loads)
    book.close(hold)
    check_book(book, [])
    tier.close()


def test_a_closed_row_touches_no_page_though_its_store_hangs(pool: KVPool, make: Make) -> None:
    row, book, text = row_of(pool, make), PageBook(24, PAGE), [*range(3 * PAGE)]
    tier = tier_of(pool, row, book)
    kept_text(tier, row, text)
    goes_on, store = threading.Event(), row._store
    assert store is not None
    get = store.get
    store.get = lambda key, take: get(key, take) if goes_on.wait(60) else None  # type: ignore[method-assign]
    hold = book.open(text, len(text), max_matched=len(text) - 1)
    assert hold is not None
    assert tier.begin("a", hold, text, len(text) - 1)
    assert tier.poll(0.0) == []
    before = [bytes_of(pool, page) for page in hold.pages]
    tier.close()
    goes_on.set()
    row._thread.join()
    assert [bytes_of(pool, page) for page in hold.pages] == before


def test_what_is_dropped_and_asked_for_again_counts(pool: KVPool, make: Make) -> None:
    row, book, text = row_of(pool, make), PageBook(24, PAGE), [*range(3 * PAGE)]
    tier = tier_of(pool, row, book)
    kept_text(tier, row, text, forget=False)
    row.forget()
    book.forget()
    until(lambda: row.idle)
    hold = book.open(text, len(text), max_matched=len(text) - 1)
    assert hold is not None
    assert not tier.begin("a", hold, text, len(text) - 1)
    assert value(row.metrics.tier_evicted("dropped")) == 3
    assert value(row.metrics.tier_early) == 1
    page = generate_latest(row.metrics.registry).decode()
    assert cache.row_of(page)[-3:] == ("3", "1", "0")
    tier.close()


def test_a_rank_keeps_nothing_that_a_later_order_may_write(pool: KVPool, make: Make) -> None:
    """A rank has no book: orders that name a page come in their order."""
    row, answers = row_of(pool, make), list[Loaded]()
    tier = RankTier(1, [row], answers.append, lambda: None)
    kept, torn = Source(b"a" * 32, TOKENS, 5), Source(b"b" * 32, TOKENS, 6)
    with row._changed:  # neither is copied before the step is launched
        tier.on(Keep((0,), kept, 0))
        tier.on(Keep((0,), torn, 0))
        chunk = Chunk(1, 0, (1,), snapshot=(16, 4))
        tier.launches(Plan(1, pages=(RowPages(1, 0, (6,)),), chunks=(chunk,)))
    until(lambda: row.idle)
    assert (row.has(kept.key), row.has(torn.key)) == (True, False)
    tier.on(LoadPages(7, ((0, kept._replace(place=8)), (0, torn)), 0))
    until(lambda: bool(answers), act=tier.poll)
    assert answers == [Loaded(1, 7, 1)]
    assert bytes_of(pool, 8) == bytes_of(pool, 5)
    tier.close()
