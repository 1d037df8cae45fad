"""The load harness as its user runs it: against a stub with known delays."""

import msgspec
import numpy as np
import pytest

from benchmarks import versus
from benchmarks.load import measurement, search
from benchmarks.load.__main__ import main
from benchmarks.load.measure import samples
from benchmarks.load.result import read
from benchmarks.load.selfcheck import WARMUP, check, running_stub
from benchmarks.load.stub import StubOptions
from tests.fault.router_doubles import DecodeDouble, make_model, serving, speak
from tests.support.pairwise import in_whole

STALL_S = 1.0


@pytest.mark.parametrize("num_processes", [2, *in_whole((1,))])
def test_nothing_is_measured_shorter_than_it_was(num_processes: int) -> None:
    options = StubOptions(ttft_s=0.04, itl_s=0.005, spread=0.5)
    true, found = check(options, 50.0, 150, num_processes=num_processes)
    assert [each.session for each in found.outcomes] == list(range(150))
    assert not [each.error for each in found.outcomes if each.error]
    assert all(each.num_output_tokens == len(each.chunk_s) == 8 for each in found.outcomes)
    assert len(found.lags) == num_processes
    for name, values in true.items():
        assert len(samples(found.outcomes)[name]) == len(values)
        if name != "gaps_s":  # a late piece shortens the gap after it
            assert samples(found.outcomes)[name].mean() >= values.mean()


def test_a_stall_is_seen_by_everyone_who_would_have_asked() -> None:
    """Coordinated omission: those due during the stall waited for its end."""
    options = StubOptions(ttft_s=0.01, itl_s=0.002, stall_after=WARMUP + 50, stall_s=STALL_S)
    true, found = check(options, 100.0, 250)
    seen = samples(found.outcomes)["ttft_s"]
    due_in_it = int((true["ttft_s"] > 0.1).sum())
    assert due_in_it > 70, "a second at 100 requests a second, less the last tenth"
    assert (seen > 0.1).sum() >= due_in_it
    assert seen.max() >= 0.95 * STALL_S
    high = np.percentile(true["ttft_s"], 90)
    assert np.percentile(seen, 90) >= high > 0.4 * STALL_S


def test_the_command_measures_searches_and_reports(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(search, "MAX_HALVINGS", 1)
    monkeypatch.setattr(measurement, "SETTLE_S", 0.0)
    paths = [str(tmp_path / name) for name in ("a.json", "b.json.gz")]
    with running_stub(StubOptions(ttft_s=0.01, itl_s=0.002)) as url:
        common = ["--url", url, "--num", "12", "--source", "problems", "--quiet"]
        first = ["--rate", "40", "--repeat", "2", "--slo", "ttft=5s"]
        assert main([*common, *first, "--json", paths[0]]) == 0
        assert main([*common, "--concurrency", "3", "--json", paths[1]]) == 0
        searched = ["--search", "--slo", "ttft=1ms", "--url", url, "--num", "5", "--quiet"]
        assert main([*searched, "--search-from", "99", "--source", "problems"]) == 0
    assert "fails" in capsys.readouterr().err, "no server answers within a millisecond here"
    a, b = (read(path) for path in paths)
    assert (len(a.runs), len(b.runs)) == (2, 1)
    assert a.summaries[0]["requests"] == a.summaries[1]["requests"]
    assert a.summaries[0]["goodput"]["share"] == 1.0
    assert len(b.runs[0].outcomes) == 12
    assert main(["report", *paths]) == 0
    assert "ttft p50" in capsys.readouterr().out
    assert main(["--concurrency", "5", "--duration", "3"]) == 2
    assert "say how much" in capsys.readouterr().err
    assert main(["--url", "http://127.0.0.1:9", "--rate", "5", "--num", "1"]) == 1


def test_streams_that_end_in_an_error_event_are_not_served(tmp_path) -> None:
    path = tmp_path / "a.json"
    with running_stub(StubOptions(ttft_s=0.01, itl_s=0.002, break_every=3)) as url:
        asked = ["--url", url, "--num", "12", "--concurrency", "4", "--source", "problems"]
        assert main([*asked, "--quiet", "--json", str(path)]) == 0
    requests = read(path).summaries[0]["requests"]
    assert (requests["served"], requests["errors"]) == (8, {"stream_error": 4})


def test_servers_are_sent_the_same_and_compared(tmp_path, capsys) -> None:
    path = tmp_path / "a.json"
    load = "--concurrency 2 --num 6 --source problems --quiet --processes 1 --slo ttft=100ms"
    slow, fast = (StubOptions(ttft_s=ttft_s, itl_s=0.002) for ttft_s in (0.2, 0.02))
    with running_stub(slow) as a, running_stub(fast) as b:
        named = [f"a={a}/v1/", f"b={b},{b}#2"]
        assert versus.main([*named, "--rounds", "2", "--json", str(path), "--load", load]) == 0
    assert "b / a" in capsys.readouterr().out
    (told,) = msgspec.json.decode(path.read_bytes())["loads"]
    assert len(set(told["digests"])) == 2, "no round has another's prompts"
    of_a, of_b = (told["figures"][name] for name in "ab")
    assert [each["goodput"]["share"] for each in of_a] == [0.0, 0.0]
    assert all(each["requests"]["served"] == 6 for each in (*of_a, *of_b))
    rows = versus.table([*map(versus.server_of, named)], told["figures"])
    whole = np.median([each["throughput"]["output_tokens_per_s"] for each in of_b])
    part = float(rows[3].split()[2].replace(",", ""))
    assert part == pytest.approx(whole / 2, rel=0.01), "a GPU's"


@pytest.mark.parametrize(("wrong", "says"), [
    (["a=http://x"], "at least two"), (["a=x", "b=x#0"], "'b=x#0' is not"),
    (["a=x", "b=y", "--load", "--search --slo ttft=1"], "--rounds repeat it"),
])  # fmt: skip
def test_mistakes_of_versus_are_told(wrong: list[str], says: str, capsys) -> None:
    assert versus.main([*wrong, "--load", "--num 1"]) == 2
    assert says in capsys.readouterr().err


def test_a_server_that_simulates_acceptance_marks_all_that_is_made_of_it(tmp_path, capsys) -> None:
    double = DecodeDouble(script=speak([70, 71, 72], sizes=(1, 2)))
    double.member = msgspec.structs.replace(double.member, simulated_accept_len=2.5)
    path = tmp_path / "a.json"
    with serving(make_model(tmp_path / "model"), double) as (_, url):
        asked = ["--url", url, "--num", "3", "--concurrency", "1", "--source", "problems"]
        assert main([*asked, "--extra", '{"max_tokens": 8}', "--quiet", "--json", str(path)]) == 0
    marked = "(SIMULATED: 2.5 tokens a step)"
    assert marked in capsys.readouterr().out.splitlines()[0]
    assert main(["report", str(path), str(path)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()[:3]  # on a busy machine doubts follow
    assert all(marked in row for row in rows)
    assert read(path).summaries[0]["simulated_accept_len"] == 2.5
