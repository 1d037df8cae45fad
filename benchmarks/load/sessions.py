"""Figures by session, and the table and plot of a load that grows: `kvlane bench --sessions 4,8`.

    first token        of all turns, p50 and p90, as everywhere from the intended moment
    tokens/s a user    1 / p90 of the time per output token: nine turns of ten are as fast
    interactivity      output tokens of all turns / the seconds that they took (MLPerf's); and
                       1 / p90 of seconds per output token of a turn (AIPerf's, end to end)
    prefilled, ideal   prompt tokens that the server had not cached, by its usage; and those that
                       it would compute if it found all that it had ever computed
    held               sessions of which every turn is served and within every objective

Pauses are in no latency, but decide what is found.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks.load.measure import spread
from benchmarks.load.records import Objectives, Outcome, Result, Run, Session
from benchmarks.load.report import aligned, ms, number, percent, pick

CHUNK_CHARS = 256  # of a prompt, which is new or was there before
WIDTH, HEIGHT, EDGE = 640, 400, 60  # of the plot
COLUMNS = (
    ("sessions", ("at_once",), lambda value: number(value, 0)),
    ("tokens/s/GPU", ("tokens_per_s_gpu",), number),
    ("tokens/s/user p90", ("tokens_per_s_user",), number),
    ("ttft p50 ms", ("ttft_s", "p50"), ms),
    ("p90", ("ttft_s", "p90"), ms),
    ("interactivity", ("interactivity",), number),
    ("e2e p90", ("e2e_interactivity",), number),
    ("prefilled", ("prefilled",), lambda value: number(value, 0)),
    ("of ideal", ("of_ideal",), lambda value: number(value, 2)),
    ("held", ("held_share",), percent),
)


def figures(
    run: Run, sessions: Sequence[Session], objectives: Objectives, at_once: int, num_gpus: int
) -> dict[str, Any]:
    """Figures of a run of these sessions, so many at once, as plain JSON values."""
    served = [outcome for outcome in run.outcomes if not outcome.error]
    ends = [outcome for outcome in served if outcome.num_output_tokens]
    tpot = spread(tpot for outcome in served if (tpot := outcome.tpot_s) is not None)["p90"]
    slow = spread(outcome.e2e_s / outcome.num_output_tokens for outcome in ends)["p90"]
    took_s = sum(outcome.e2e_s for outcome in ends)
    num_output = sum(outcome.num_output_tokens for outcome in served)
    prefilled = sum(outcome.num_prompt_tokens - outcome.num_cached_tokens for outcome in served)
    least = ideal(served, sessions)
    asked = {outcome.session for outcome in run.outcomes}
    failed = {each.session for each in run.outcomes if not objectives.met_by(each)}
    return {
        "at_once": at_once,
        "num": len(asked),
        "held": len(asked - failed),
        "held_share": len(asked - failed) / len(asked) if asked else None,
        "ttft_s": spread(ttft for outcome in served if (ttft := outcome.ttft_s) is not None),
        "tokens_per_s_user": 1 / tpot if tpot else None,
        "tokens_per_s_gpu": num_output / run.wall_s / num_gpus if run.wall_s else 0.0,
        "interactivity": num_output / took_s if took_s else None,
        "e2e_interactivity": 1 / slow if slow else None,
        "prefilled": prefilled,
        "ideal": least,
        "of_ideal": prefilled / least if least else None,
    }


def ideal(served: Iterable[Outcome], sessions: Sequence[Session]) -> float:
    """Tokens to prefill where nothing is ever computed twice, by the server's counts."""
    seen, least = set[bytes](), 0.0
    before: dict[int, Outcome] = {}
    for outcome in served:
        turn = sessions[outcome.session].turns[outcome.turn]
        last = before.get(outcome.session)
        before[outcome.session] = outcome
        if last is not None and not turn.is_whole:
            new = outcome.num_prompt_tokens - last.num_prompt_tokens - last.num_output_tokens
            least += max(1, new)
        else:
            least += outcome.num_prompt_tokens * _new_share(str(turn.prompt), seen)
    return least


def _new_share(text: str, seen: set[bytes]) -> float:
    """Of a text: how much of it does not begin any before."""
    chain, new = b"", 0
    parts = [text[at : at + CHUNK_CHARS] for at in range(0, len(text), CHUNK_CHARS)] or [""]
    for part in parts:
        chain = blake2b(chain + part.encode(), digest_size=12).digest()
        new += chain not in seen
        seen.add(chain)
    return new / len(parts)


def table(result: Result) -> list[str]:
    """A line for each load; a star where no other load is better in both rates."""
    found = [each["sessions"] for each in result.summaries if "sessions" in each]
    best = {id(each) for each in pareto(found)}
    rows = [["", *(label for label, _, _ in COLUMNS)]]
    for each in found:
        cells = (style(pick(each, *path)) for _, path, style in COLUMNS)
        rows.append(["*" if id(each) in best else "", *cells])
    return aligned(rows)


def pareto(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that none beats in tokens/s a GPU and tokens/s a user, slow users first."""

    def rates(each: dict[str, Any]) -> tuple[float, float]:
        return each["tokens_per_s_user"] or 0.0, each["tokens_per_s_gpu"]

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] >= other[0] and one[1] >= other[1]

    kept = [each for each in found if not any(beats(rates(o), rates(each)) for o in found)]
    return sorted(kept, key=rates)


def draw(named: Sequence[tuple[str, Result]], path: Path) -> None:
    """Write the plot as SVG: a point each load, a line along those that none beats."""
    loads = [(name, [s["sessions"] for s in r.summaries if "sessions" in s]) for name, r in named]
    most = [
        1.1 * max((each[key] or 0.0 for _, found in loads for each in found), default=1.0) or 1.0
        for key in ("tokens_per_s_user", "tokens_per_s_gpu")
    ]

    def at(each: dict[str, Any]) -> tuple[float, float]:
        x, y = (each["tokens_per_s_user"] or 0.0) / most[0], each["tokens_per_s_gpu"] / most[1]
        return EDGE + x * (WIDTH - 2 * EDGE), HEIGHT - EDGE - y * (HEIGHT - 2 * EDGE)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<path d="M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}" fill="none" stroke="#888"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">tokens/s a user, p90 '
        f"(0 to {most[0]:,.1f})</text>",
        f'<text x="{EDGE}" y="{EDGE - 24}">tokens/s a GPU (0 to {most[1]:,.1f})</text>',
    ]
    for index, (name, found) in enumerate(loads):
        hue = 210 + 130 * index
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, pareto(found)))
        parts.append(f'<polyline points="{line}" fill="none" stroke="hsl({hue},60%,40%)"/>')
        for x, y, label in ((*at(each), str(each["at_once"])) for each in found):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="hsl({hue},60%,40%)"/>')
            parts.append(f'<text x="{x + 5:.1f}" y="{y - 5:.1f}">{label}</text>')
        shown = name.replace("&", "&amp;").replace("<", "&lt;")
        place = f'x="{WIDTH - EDGE}" y="{EDGE + 16 * index}" text-anchor="end"'
        parts.append(f'<text {place} fill="hsl({hue},60%,40%)">{shown}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]))
