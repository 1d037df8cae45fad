"""Sixteen bytes at a time: loads, stores and polls of memory that other GPUs write, in PTX.

A chunk is 16 bytes: four words of 32 bits, in four tensors, so that a thread moves a
chunk by one access. Tensors of chunks must not be smaller than the program's threads: Triton would
hold an element in several threads, and all of them would run the access.

Memory of peers is touched by relaxed accesses of the scope of the system (PTX ISA, "Memory
consistency model"). They are never torn within an element, and no L1 holds such memory.
"""

from typing import Any

from worker.ops.jit import tl, triton


def _load(scope: str) -> Any:
    return tl.constexpr(f"""
        {{
        .reg .pred wanted;
        setp.ne.s32 wanted, $5, 0;
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        @wanted ld.{scope}global.v4.b32 {{$0, $1, $2, $3}}, [$4];
        }}
        """)


def _store(scope: str) -> Any:
    return tl.constexpr(f"""
        {{
        .reg .pred wanted;
        setp.ne.s32 wanted, $6, 0;
        @wanted st.{scope}global.v4.b32 [$1], {{$2, $3, $4, $5}};
        mov.b32 $0, 0;
        }}
        """)


def _poll(mask: str, control: str, begin: str, look: str) -> Any:
    """Where `mask`, run `look` until it leaves `again` false, or the fault or the limit ends it.

    begin: clears the outputs, and declares registers of `look` beside `low`.
    """
    return tl.constexpr(f"""
        {{
        .reg .pred again, other;
        .reg .b32 who, turns, low;
        .reg .b64 since, now, word;
        {begin}
        mov.b32 turns, 0;
        mov.b64 since, 0;
        setp.eq.s32 other, {mask}, 0;
        @other bra LEFT;
        LOOK:
        {look}
        @!again bra LEFT;
        add.u32 turns, turns, 1;
        and.b32 low, turns, 1023;
        setp.ne.u32 other, low, 0;
        @other bra LOOK;
        mov.u64 now, %globaltimer;
        setp.eq.s64 other, since, 0;
        @other mov.b64 since, now;
        sub.s64 now, now, since;
        setp.lt.s64 other, now, 20000000;
        @other bra LOOK;
        shr.b32 low, turns, 10;
        mov.u32 who, %tid.x;
        xor.b32 low, low, who;
        and.b32 low, low, 127;
        setp.ne.u32 other, low, 0;
        @other bra LOOK;
        ld.relaxed.sys.global.b64 word, [{control}];
        setp.ne.s64 other, word, 0;
        @other bra LEFT;
        ld.relaxed.sys.global.b64 word, [{control} + 8];
        setp.le.s64 other, now, word;
        @other bra LOOK;
        mov.b64 word, 1;
        st.relaxed.sys.global.b64 [{control}], word;
        LEFT:
        }}
        """)


LOAD, LOAD_SHARED = _load(""), _load("relaxed.sys.")
STORE, STORE_SHARED = _store(""), _store("relaxed.sys.")
POLL_CHUNKS = _poll(
    "$7",
    "$6",
    "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
    """
        ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
        setp.eq.s32 again, $0, $5;
        setp.eq.or.s32 again, $1, $5, again;
        setp.eq.or.s32 again, $2, $5, again;
        setp.eq.or.s32 again, $3, $5, again;
        """,
)
POLL_MARKED = _poll(
    "$5",
    "$4",
    """
        .reg .b32 first_mark, second_mark;
        .reg .b64 first, second;
        mov.b32 $0, 0; mov.b32 $1, 0;
        """,
    """
        ld.relaxed.sys.global.v2.b64 {first, second}, [$2];
        mov.b64 {$0, first_mark}, first;
        mov.b64 {$1, second_mark}, second;
        setp.ne.s32 again, first_mark, $3;
        setp.ne.or.s32 again, second_mark, $3, again;
        """,
)
POLL_FLAGS = _poll(
    "$4",
    "$3",
    """
        .reg .b32 found_mark;
        mov.b64 $0, 0;
        """,
    """
        ld.acquire.sys.global.b64 $0, [$1];
        mov.b64 {low, found_mark}, $0;
        setp.ne.s32 again, found_mark, $2;
        """,
)


@triton.jit
def load_chunks(address, mask, SHARED: tl.constexpr = False):  # pyright: ignore
    """Chunks' four words, of this GPU's own memory, or with SHARED of any; zeros where not `mask`.

    address: i64, multiples of 16; mask: bool, of the same shape.
    """
    return tl.inline_asm_elementwise(
        LOAD_SHARED if SHARED else LOAD, "=&r,=&r,=&r,=&r,l,r", [address, mask.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_chunks(address, words, mask, SHARED: tl.constexpr = False):  # pyright: ignore
    """Writes chunks' four words to this GPU's own memory, or with SHARED to any, where `mask`."""
    tl.inline_asm_elementwise(
        STORE_SHARED if SHARED else STORE, "=r,l,r,r,r,r,r",
        [address, words[0], words[1], words[2], words[3], mask.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def poll_chunks(address, absent, control, mask):
    """load_chunks() of any GPU's memory, once none of a chunk's words is `absent` any more."""
    return tl.inline_asm_elementwise(
        POLL_CHUNKS, "=&r,=&r,=&r,=&r,l,r,l,r", [address, absent, control, mask.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_marked(address, a, b, mark, mask):
    """Writes two words, either with `mark` in the same 8 bytes, to any GPU's memory."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred wanted;
        .reg .b64 first, second;
        setp.ne.s32 wanted, $5, 0;
        mov.b64 first, {$2, $4};
        mov.b64 second, {$3, $4};
        @wanted st.relaxed.sys.global.v2.b64 [$1], {first, second};
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r,r,r", [address, a, b, mark, mask.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def poll_marked(address, mark, control, mask):
    """The two words that store_marked() has written with this mark, once they are here."""
    return tl.inline_asm_elementwise(
        POLL_MARKED, "=&r,=&r,l,r,l,r", [address, mark, control, mask.to(tl.int32)],
        dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_flags(address, value, mask):
    """Writes i64 flags to any GPU's memory, by the threads of the first warp: a release.

    A store and no atomic: a PCIe link need not carry those. The first warp holds up to 32 elements.
    """
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred wanted;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.lt.u32 wanted, thread, 32;
        setp.ne.and.s32 wanted, $3, 0, wanted;
        @wanted st.release.sys.global.b64 [$1], $2;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,l,r", [address, value, mask.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def poll_flags(address, mark, control, mask):
    """The i64 flags at `address`, once their upper halves are `mark`: an acquire."""
    return tl.inline_asm_elementwise(
        POLL_FLAGS, "=&l,l,r,l,r", [address, mark, control, mask.to(tl.int32)],
        dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
