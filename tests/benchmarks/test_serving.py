"""The table of served figures: the same recorded loads against servers with known delays."""

from benchmarks import serving
from benchmarks.load.result import read
from benchmarks.load.selfcheck import running_stub
from benchmarks.load.stub import StubOptions

FAST, SLOW = StubOptions(ttft_s=0.01, itl_s=0.001), StubOptions(ttft_s=1.2, itl_s=0.001)
SLO = "ttft=1s,itl=1s"  # which the fast one keeps on a busy machine, too


def test_all_servers_get_the_same_loads_and_stand_side_by_side(tmp_path, capsys) -> None:
    common = [
        "--rates", "20,full", "--duration", "0.5",
        "--lengths", "8+lognormal(8,0.5),4-6", "--full", "3", "--full-lengths", "12,3",
        "--tokenizer", "tiny", "--quiet", "--processes", "1", "--warmup", "0",
        "--slo", SLO,
    ]  # fmt: skip
    files = {name: tmp_path / f"{name}.json" for name in ("fast", "slow")}
    with running_stub(FAST) as one, running_stub(FAST) as other, running_stub(SLOW) as slow:
        for name, urls in (("fast", f"{one},{other}/v1"), ("slow", slow)):
            asked = ["--name", name, "--url", urls, "--json", str(files[name])]
            assert serving.main([*common, *asked]) == 0
    fast, second = (read(path) for path in files.values())
    digests = [[each["digest"] for each in found.workload["each"]] for found in (fast, second)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 2
    capsys.readouterr()
    assert serving.main(["report", *map(str, files.values())]) == 0
    lines = capsys.readouterr().out.splitlines()
    loads = ["20/s", "20/s", "full", "full"]
    assert [line.split()[:2] for line in lines[1:5]] == [
        [load, name] for load, name in zip(loads, 2 * ["fast", "slow"], strict=True)
    ]
    assert "fast: highest rate with 90.0 % good: 20/s" in lines
    assert "slow: highest rate with 90.0 % good: none" in lines
    assert not any("FAILED" in line for line in lines)
