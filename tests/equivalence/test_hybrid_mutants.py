"""What goes wrong in recurrent layers without a word turns a law red.

A mutant is a line of ours that reads otherwise. Chunks begin on the grid of blocks, so one that is
counted from a chunk's start is the same.
"""

import __future__

import importlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence import test_hybrid_laws as laws
from tests.equivalence import test_models as models
from tests.equivalence import test_mtp as mtp
from tests.support.engines import running
from tests.support.pairwise import one_in
from tests.unit import test_chunk_rows, test_recurrent, test_snapshots
from tests.unit import test_states as states

pytestmark = pytest.mark.usefixtures("one_thread")


def rule(path: Path) -> None:
    shape = test_recurrent.SHAPES[1]
    for prompt in (70, 0):
        test_recurrent.test_every_width_and_acceptance_equals_the_recurrence(
            shape, prompt, test_recurrent.WIDTHS, test_recurrent.F32
        )
    test_recurrent.test_neither_cut_nor_company_changes_a_bit_of_a_prompt(shape, test_recurrent.F32)


def oracle(path: Path) -> None:
    for case in ("qwen3-next", "qwen3.5"):
        models.test_logits_and_greedy_ids_equal_transformers(case, path / case)


def served(path: Path) -> None:
    """Some of the law's requests, pulled by two ranks from one, in chunks, with drafts."""
    (prompts, samplings), num = laws.asked(), len(laws.LENGTHS)
    asked = prompts[num - 4 :], samplings[num - 4 :]
    with running(laws.sections("never"), num_prefill=0) as cluster:
        expected = [
            laws.ids(cluster.client.generate([p], s))[0] for p, s in zip(*asked, strict=True)
        ]
    for draws, spec in (("decode", {}), ("prefill", {"drafter": "mtp", "widths": [1, 4]})):
        config = laws.sections("always", max_prefill_tokens=100)
        config["disaggregation"]["first_token"] = draws
        config["spec"] = spec
        with running(config, decode_tp=2) as cluster:
            for _ in range(2):
                assert laws.ids(cluster.client.generate(*asked)) == expected
            laws.check_slots(cluster)


def pulled(path: Path) -> None:
    states.test_each_attempt_pulls_the_state_of_its_own_source()
    states.test_pages_without_their_state_are_computed_anew()


def snapped(path: Path) -> None:
    test_recurrent.test_a_snapshot_is_the_state_of_a_prompt_that_ends_there(
        test_recurrent.SHAPES[1], test_recurrent.F32
    )
    test_recurrent.test_a_fold_that_passes_a_line_of_the_grid_stores_the_state_there(
        test_recurrent.SHAPES[1], 62
    )


def kept(path: Path) -> None:
    test_snapshots.test_a_copy_is_forgotten_with_the_request_that_it_was_for()
    test_snapshots.test_a_fork_is_a_copy_and_what_it_is_made_of_stays_until_then()
    for num_pages in (90, 4000):
        prompts = test_snapshots.Prompts(2, num_pages, 4)
        for _ in range(120):
            prompts.turn()
        prompts.exact = False
        prompts.book.forget()
        prompts.check()


def left(path: Path) -> None:
    test_snapshots.test_a_snapshot_that_steps_may_store_again_is_not_left()
    for widths in ((1,), (4,)):
        made = test_snapshots.Decoding(1, widths, 75)
        for _ in range(1500):
            made.turn()


Law = Callable[[Path], None]
LAWS: dict[str, Law] = {
    "rule": rule,
    "oracle": oracle,
    "drafts": lambda path: mtp.test_drafts_equal_transformers("qwen3.5", path),
    "cooled": lambda _: (
        states.test_a_slot_is_not_handed_out_before_steps_that_may_write_it_have_settled()
    ),
    "gridded": lambda _: states.test_chunks_end_on_the_grid_of_blocks_or_with_their_prompt(),
    "pulled": pulled,
    "captured": lambda _: laws.test_captures_leave_every_state_alone(3),
    "announced": lambda _: states.test_a_state_is_announced_once_its_last_step_has_settled(),
    "held": lambda _: states.test_a_slot_outlives_the_row_that_filled_it(),
    "hashed": lambda _: states.test_the_state_is_part_of_the_layout(),
    "snapped": snapped,
    "kept": kept,
    "left": left,
    "unstored": lambda _: test_chunk_rows.test_any_plan_of_chunks_is_as_if_its_pages_had_come_first(
        "twin", pytest.MonkeyPatch()
    ),
    "served": served,
}
MUTATED = "mutated\n"  # what a process of its own says before the law
# Law -> where -> (what the line says, what it says in the mutant).
MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "rule": {
        "attention.recurrent.delta_net:delta_window_ref": [
            ("- folded) * active", "- folded + (folded > 0)) * active"),  # pending tokens
            ("(i < kept)", "(i < kept + width - 1)"),  # rejected drafts are folded
            ("state.ring[rows.live]\n", "state.ring[rows.live.roll(1)]\n"),  # another row's
            ("torch.cat((ring, new)", "torch.cat((torch.cat((new, ring), 1)[:, :num_lines], new)"),
            ("kept[:, None] + torch", "kept[:, None] + width - 1 + torch"),  # inputs of rejected
            (
                "by_head(torch.where((kept > 0).view(n, 1, 1), last",
                "by_head(torch.where((kept > 0).view(n, 1, 1), last.sin()",
            ),
            ("(active & (folded > 0))", "active"),  # read at position 0
            ("rows.live > 0", "rows.live >= 0"),  # a row that is not there
            ("pending + (width == 1)", "pending"),  # a window of one lags
        ],
        "attention.recurrent.delta_net:delta_chunk_ref": [
            ("if lengths[i] == count:", "if False:"),  # read at position 0
            ("starts[i + 1])", "max(starts[i + 1], (i == len(starts) - 2) * len(packed)))"),
            ("raw[None, 1 - TAPS :]", "raw[None, -TAPS:-1]"),
        ],
        "attention.recurrent.delta_net:convolved": [("weight[:, tap]", "weight[:, tap - 1]")],
    },
    "oracle": {
        "attention.recurrent.delta_net:inputs": [
            ("x.repeat_interleave(", "x.flip(-2).repeat_interleave("),  # h // ratio
            ("torch.sigmoid(b)", "torch.sigmoid(b).bfloat16().float()"),
            ("-weights.a_log.exp()", "weights.a_log.exp().mul(0.1)"),
            ("a + weights.dt_bias", "a"),
            ("q = q * shape.key_dim**-0.5\n", "\n"),
        ],
        "attention.recurrent.delta_net:gated_norm": [
            ("o * weights.norm)", "o * (1 + weights.norm))")
        ],
        "model.layers:RMSNorm.shards": [("self._plus", "0.0")],
        "weights.shard:by_head": [
            ("slice(start, start + size)", "slice(shape[1] - start - size, shape[1] - start)"),
        ],
        "config.checkpoint.shape:read_layer_shape": [
            ("int(head_dim * factor) // 2 * 2", "head_dim"),
        ],
    },
    "drafts": {"drafts.chain:ChainDrafter.forward": [("self.shape.norm_output", "False")]},
    "cooled": {"cache.book:PageBook.num_free_slots": [("num_pullable", "num_free")]},
    "gridded": {"schedule.prefill:chunk_end": [("end // grain * grain", "end")]},
    "pulled": {
        "transfer.fetch:Fetch.begin": [
            ("_Pages(self._context.layout.num_groups)", "self._pages"),  # of the attempt before
        ],
        "transfer.fetch:Fetch.landed": [("self._pages.state_landed or", "True or")],
        "transfer.fetch:Fetch.end": [("num_tokens = 0", "pass")],
    },
    "captured": {
        "run.full:FullDecode.__init__": [("torch.zeros(self.buckets", "torch.ones(self.buckets")]
    },
    "announced": {"transfer.outbound:Outbound._send_ready": [("last = False", "pass")]},
    "held": {
        "schedule.prefill:PrefillScheduler._leave_row": [
            (
                "self.rows.release(req.row)",
                "self.rows.release(req.row), self.book._slots.free([req.hold.slot])",
            ),
        ],
    },
    "hashed": {
        "cache.layout:ModelLayout.identity": [
            ("asdict(self)", "asdict(replace(self, state=None))")
        ],
    },
    "snapped": {
        "attention.recurrent.delta_net:delta_chunk_ref": [
            ("if at + DELTA_BLOCK == snap:", "if at == snap:"),  # behind the line
            ("chunks.snap_slots[i : i + 1]", "chunks.snap_slots[:1]"),  # of another request
            ("raw[None, snap : snap + TAPS - 1]", "raw[None, snap + 1 : snap + TAPS]"),
        ],
        "attention.recurrent.delta_net:delta_window_ref": [
            ("rows.grid - 1 - folded", "rows.grid - folded"),
            ("rows.snap_slot[rows.live]", "rows.snap_slot[rows.live.roll(1)]"),
            ("(line < kept)", "(line < kept + width - 1)"),  # of a draft that may be rejected
            ("line[:, None] + 1 +", "line[:, None] +"),
        ],
    },
    "kept": {
        "cache.snapshots:Snapshots._deepest": [(" if node.state)", ")")],  # a hit without one
        "cache.snapshots:Snapshots.close": [("self.copies.pop(hold.slot, None)", "pass")],
        "cache.snapshots:Snapshots.drop": [
            ("self._free.append(node.state)", "pass"),  # lost with its node
            ("self._free.append(node.state)", "self._free += [node.state, node.state]"),
        ],
        "cache.snapshots:Snapshots.fork": [  # it shares the state, or the page
            ("self.copies[target.slot] =", "target.slot ="),
            (
                "self.page_copies[target.slot] = source.pages[number], target.pages[number]",
                "target.pages[number] = source.pages[number]",
            ),
        ],
        "cache.book:PageBook.close": [("hold.slot in self.snapshots.copies.values()", "False")],
        "cache.prefix:PrefixTree.evict": [("self._gone(node)", "pass")],
        "cache.snapshots:Snapshots.keep": [
            ("hold.nodes[at // self._page_size - 1]", "hold.nodes[-1]")
        ],
        "schedule.prefill:PrefillScheduler.plan": [
            ("store_from=req.hold.num_matched", "store_from=0"),
            ("self.book.snapshots.drain() if self.book.snapshots.copies else None", "None"),
        ],
        "schedule.prefill:PrefillScheduler.commit": [("num_stored_tokens", "num_computed_tokens")],
    },
    "left": {
        "cache.snapshots:Snapshots.leave_row": [
            (" and last_line(num_folded_ub, self.grid) == at", ""),  # a step in flight writes it
        ],
        "cache.snapshots:Snapshots.store_of_row": [("self.take(), bound", "self.take(), 0")],
        "schedule.decode:DecodeScheduler.settle": [  # a window too far
            ("len(req.tokens) - (1 if width > 1 else 0)", "len(req.tokens) + len(result.tokens)"),
        ],
    },
    "unstored": {
        "step.chunk_rows:chunk_rows_ref": [("positions < lines[7][owner]", "positions < 0")],
    },
    "served": {
        "step.rows:accept_rows_ref": [
            ("torch.where(valid, folded, columns.folded[rows])", "columns.folded[rows]"),
        ],
        "schedule.req:PrefillReq.num_target_tokens": [
            ("- (self.sampling is None)", "- (self.sampling is None and not self.hold.slot)"),
        ],
        "model.delta_net:_rows": [
            (
                "part = Part(total, ",
                "rows = rows if name == 'q' else slice("
                "rows.start // 2, rows.start // 2 + len(parts[name]))\n        "
                "part = Part(total, ",
            )
        ],
    },
}
COSTS_MUCH = [pytest.mark.whole]  # an engine in a process of its own
CASES = [
    pytest.param(
        law, where, *change, id=f"{where}-{number}", marks=COSTS_MUCH * (law == "served")
    )
    for law, places in MUTANTS.items()
    for where, changes in places.items()
    for number, change in enumerate(changes)
]  # fmt: skip


@pytest.mark.parametrize(("law", "where", "old", "new"), one_in(16, CASES))
def test_a_mutant_is_red(
    law: str, where: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if law == "served":  # an error of an engine's thread ends the process
        asked = [sys.executable, "-m", "tests.equivalence.test_hybrid_mutants", where, old, new]
        root = Path(__file__).parents[2]
        ended = subprocess.run(
            asked, capture_output=True, text=True, check=False, cwd=root, timeout=300
        )
        assert ended.stdout == MUTATED, ended.stderr
        assert ended.returncode != 0
        return
    mutate(monkeypatch, where, old, new)
    with pytest.raises(Exception):  # noqa: B017, PT011 - an assertion, here or in a worker
        LAWS[law](tmp_path)


@pytest.mark.whole  # they are tests elsewhere
@pytest.mark.parametrize("law", LAWS)
def test_without_a_mutant_the_law_is_green(law: str, tmp_path: Path) -> None:
    LAWS[law](tmp_path)


def mutate(monkeypatch: pytest.MonkeyPatch, where: str, old: str, new: str) -> None:
    """Put a changed function into its module or class, and wherever it was imported by name."""
    module_name, _, path = where.partition(":")
    own = module_name.startswith("router.")
    module = importlib.import_module(module_name if own else f"worker.{module_name}")
    *owners, name = path.split(".")
    owner: Any = getattr(module, owners[0]) if owners else module
    real: Any = inspect.getattr_static(owner, name)
    function = real.fget if isinstance(real, property) else real
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@property\n")
    assert source.count(old) == 1, f"{where}: {source.count(old)} times {old!r}"
    made: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag  # names of types alone may not be there
    exec(compile(source.replace(old, new), where, "exec", flags), vars(module), made)
    changed = property(made[name]) if isinstance(real, property) else made[name]
    monkeypatch.setattr(owner, name, changed)
    for other in [
        m for n, m in sys.modules.items() if n.startswith(("worker.", "router.", "tests."))
    ]:
        for attribute, value in list(vars(other).items()):
            if value is real and other is not module:
                monkeypatch.setattr(other, attribute, changed)
            elif value is real:
                monkeypatch.setattr(module, attribute, changed)


if __name__ == "__main__":
    mutate(pytest.MonkeyPatch(), *sys.argv[1:])
    sys.stdout.write(MUTATED)
    sys.stdout.flush()
    served(Path())
