"""What all tests share: how the processes of pytest-xdist divide them, products, the gpu marker.

With `-n 3`, what has costly fixtures stays together: a module is run by one process, one of SPLIT
by any of them, test by test. What starts clusters is run one after another, as these have fixed
ports and look at what is left of processes: by two processes where each is in namespaces of its
own (those with a Ray of their own, and those that share one), else by one.
"""

import faulthandler
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests.e2e.harness import APART, part_processes
from tests.e2e.shared import LENT, clusters, serve
from tests.support import pairwise, places
from tests.support.patience import HANG_S

__all__ = ["clusters", "serve"]

gc.disable()  # until tests are collected
# Hundreds of processes import the same modules: else each compiles them anew, asserts as well.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Each process has a core. Engines, in this process and in clusters, take as many threads as this
# says; two threads that wait for each other on busy cores take several times as long as one.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
# No test speaks TLS; but every client of httpx would load all certificates of the machine, 40 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Else it is five seconds wherever a test gives none.
for part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, part, HANG_S)

CRASHES = pytest.StashKey[Path]()  # a folder, in which each process says why it ends
CLUSTER, OWN_RAY = "cluster", "own_ray"
NICE = 5  # of processes that run other tests: clusters wait more than they compute, and go first
# First those that look for what a Ray of their own has left, then those that share one; what asks
# for the same cluster follows one another, and who kills in it comes last of these.
OWN_RAYS = ("test_two_nodes", "test_interrupted_starts", "test_lifecycle")
CLUSTERS = (
    *OWN_RAYS, "test_prefill_decode", "test_clients", "test_ports", "test_lm_eval", "test_chaos",
    "test_openapi", "test_fuzz", "test_disconnects", "test_tensor_parallel",
)  # fmt: skip
# Long ones first, so that the processes end together; all others follow. What waits more than it
# computes (transport, protocol_faults, load_harness, cluster_hub, wire, liveness, router_*) lies
# between what computes, so that both cores have work.
EARLY = (
    OWN_RAY, CLUSTER, "test_drafters", "test_interpreted", "test_transport", "test_ranks",
    "test_engine_laws", "test_protocol_faults", "test_api_laws", "test_compiled", "test_tier",
    "test_models", "test_claims", "test_eight_bit_weights", "test_hybrid_laws", "test_failover",
    "test_first_token", "test_full_decode", "test_windows", "test_load_harness",
    "test_random_delays", "test_piecewise", "test_cluster_hub",
    "test_train", "test_wire", "test_benchmarks",
    "test_liveness", "test_sampler", "test_attention_backends", "test_router_direct",
    "test_ngram", "test_router_door", "test_structured",
    "test_contained", "test_router_dispatch",
    "test_width", "test_router_life", "test_cluster_supervisor", "test_shared_port",
    "test_handshake", "test_all_reduce",
)  # fmt: skip
# Run by one process, which fits drafters once for both.
TOGETHER = {"test_drafter_mutants": "test_drafters"}
SPLIT = (
    "test_interpreted",
    "test_memory",
    "test_collective",
    # Those on a GPU wait for the compiler, which takes one core.
    "test_attention_features_on_cuda",
    "test_attention_on_cuda",
    "test_eight_bits_on_cuda",
    "test_kernels_on_cuda",
    "test_prompts_on_hopper",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole",
        action="store_true",
        help="all cases of products, of which else a few hold every value; all seeds and bodies",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    pairwise.whole = config.option.whole
    # Else an example that takes longer than 200 ms fails.
    hypothesis.settings.register_profile("kvlane", deadline=None)
    hypothesis.settings.load_profile("kvlane")
    if getattr(config.option, "numprocesses", None):
        part_processes(config)
        config.stash[CRASHES] = Path(tempfile.mkdtemp(prefix="kvlane-crashes-"))
        config.add_cleanup(lambda: shutil.rmtree(config.stash[CRASHES]))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Write into a file why this process ends, where nobody else would tell."""
    given = getattr(session.config, "workerinput", None)
    if given is None:
        return
    file = (Path(given["crashes"]) / given["workerid"]).open("w")
    faulthandler.enable(file)
    handler = logging.StreamHandler(file)
    handler.setLevel(logging.CRITICAL)  # an engine that fails ends its process
    logging.getLogger("kvlane").addHandler(handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["crashes"] = str(node.config.stash[CRASHES])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any, sched: Any) -> None:
    for path in sched.config.stash[CRASHES].iterdir():
        if text := path.read_text():
            report.longrepr += f"\n{path.name} has written:\n{text}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the marker `product` gets its factors as arguments."""
    marker = metafunc.definition.get_closest_marker("product")
    if marker is not None:
        chosen = pairwise.every if pairwise.whole else pairwise.each_value
        cases = chosen(marker.kwargs)
        names = ["-".join(str(value) for value in case) for case in cases]
        metafunc.parametrize(tuple(marker.kwargs), cases, ids=names)


@cache
def group_of(path: Path) -> str:
    """Modules of the same name are run one after another by one process.

    On two cores one Ray starts at a time: its node fails where an agent takes 15 s to start.
    """
    text = path.read_text(encoding="utf-8")
    starts = any(f"from tests.e2e.{name} import" in text for name in ("harness", "shared"))
    if starts:
        two_lanes = os.environ.get(APART) and (os.cpu_count() or 1) > 2
        return OWN_RAY if path.stem in OWN_RAYS and two_lanes else CLUSTER
    return TOGETHER.get(path.stem, path.stem)


def rank_of(path: Path) -> tuple[int, int]:
    """What is run early has a low one."""
    group = group_of(path)
    among = CLUSTERS.index(path.stem) if path.stem in CLUSTERS else len(CLUSTERS)
    return EARLY.index(group) if group in EARLY else len(EARLY), among


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    # Not --dist=loadgroup: xdist 3.8 does not see the groups under pytest 9.2.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            group = group_of(config.rootpath / file)
            return f"{group}::{test}" if group in SPLIT else group

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Processes begin to collect at different files: a module that has not been compiled yet is
    then compiled by the first that comes to it, and not by all at once."""
    given = getattr(session.config, "workerinput", None)
    if given is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = int(given["workerid"].removeprefix("gw")) * len(files) // given["workercount"]
    session.config.args = [str(file) for file in files[first:] + files[:first]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.whole:
        items[:] = [item for item in items if item.get_closest_marker("whole") is None]
    of_gpus = [item for item in items if item.get_closest_marker("gpu") is not None]
    if of_gpus and not num_gpus():  # one of each file says so: a thousand would take seconds
        firsts = {item.path: item for item in reversed(of_gpus)}.values()
        gone = set(of_gpus).difference(firsts)
        items[:] = [item for item in items if item not in gone]
    items.sort(key=lambda item: (rank_of(item.path), item.path))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection of garbage walks through them.

    What tests make, and what libraries keep, is walked through seldom: 0.16 s each time.
    """
    if comparison := sys.modules.get("torch.testing._comparison"):
        vars(comparison)["_HAS_DTENSOR"] = False  # no test has one; assert_close imports it for 1 s
    gc.freeze()
    gc.set_threshold(700, 10, 50)
    gc.enable()


def pytest_sessionfinish() -> None:
    places.remove()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy core take twenty times as long as one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Clusters end with the last module of them: else Ray would idle beside all other tests."""
    if nextitem is None or group_of(nextitem.path) not in (CLUSTER, OWN_RAY):
        lent = item.config.stash.get(LENT, None)
        if lent is not None:
            lent.end_all()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if hasattr(item.config, "workerinput") and group_of(item.path) not in (CLUSTER, OWN_RAY):
        os.nice(max(0, NICE - os.nice(0)))
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    wanted = marker.args[0]
    if num_gpus() < wanted:
        pytest.skip(f"needs {wanted} CUDA devices, found {num_gpus()}")
    if marker.kwargs.get("alone") and os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.skip("looks at all of a device's memory, so nothing else may run: leave out -n")
