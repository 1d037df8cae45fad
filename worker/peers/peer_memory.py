"""Sixteen bytes at a time: loads, stores and polls of memory that other GPUs write.

A chunk is 16 bytes: four words of 32 bits, each in a tensor of its own, so that a thread moves a
chunk by one access. Tensors of chunks must not be smaller than the program's threads: Triton would
hold an element in several threads, and each would run the access.

Memory of peers is touched by relaxed accesses of the scope of the system (PTX ISA, "Memory
consistency model"). They are never torn within an element, and no L1 holds what they read. Under
the interpreter they are plain loads and stores of memory that processes share.
"""

from typing import Any

from worker.ops.jit import INTERPRETED

if INTERPRETED:
    from worker.peers import peer_interpreted as access
else:
    from worker.peers import peer_ptx as access

CHUNK_BYTES = 16
# Two i64 words in pinned host memory. A poll that lasts longer than the limit sets the fault, and a
# poll that sees the fault set ends, so all polls of a step with a lost peer end together. Reading
# them crosses PCIe, which takes milliseconds if all threads of a kernel do so; the peers then wait
# as long, read them too, and never catch up (measured: 2 ms for each sum once one rank was late by
# 0.7 ms). So a poll looks there only once it has lasted 20 ms, and one thread in 128 at a time.
CONTROL_WORDS = 2  # fault, limit_ns
FAULT, LIMIT_NS = range(CONTROL_WORDS)

load_chunks: Any = access.load_chunks
load_peer_chunks: Any = access.load_peer_chunks
store_chunks: Any = access.store_chunks
store_peer_chunks: Any = access.store_peer_chunks
poll_chunks: Any = access.poll_chunks
store_marked: Any = access.store_marked
poll_marked: Any = access.poll_marked
store_flags: Any = access.store_flags
poll_flags: Any = access.poll_flags
