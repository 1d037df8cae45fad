"""What all tests share: how the processes of pytest-xdist divide them, and the gpu marker.

With `-n 2`, every module is run by one process, as its fixtures are costly, and all that start real
clusters by one as well: these have fixed ports and look at what is left of processes.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import enter_namespace

# Longest first, so that the processes end together.
ORDER = ("cluster", "equivalence", "fault", "contract", "unit")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        enter_namespace(config)  # before xdist starts its processes, which have to be inside


@cache
def group_of(path: Path) -> tuple[str, str]:
    """(kind, name): modules of the same name are run one after another by one process."""
    if path.parent.name == "e2e" or "tests.e2e.harness" in path.read_text(encoding="utf-8"):
        return "cluster", "cluster"
    return path.parent.name, path.stem


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    # Not --dist=loadgroup: xdist 3.8 does not see the groups under pytest 9.2.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath / nodeid.partition("::")[0])[1]

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # not a process of pytest-xdist
        return
    ranks = {kind: rank for rank, kind in enumerate(ORDER)}
    items.sort(key=lambda item: ranks.get(group_of(item.path)[0], len(ORDER)))
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # each process has a core


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    wanted = marker.args[0]
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"needs {wanted} CUDA devices, found {torch.cuda.device_count()}")
    if marker.kwargs.get("alone") and os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.skip("looks at all of a device's memory, so nothing else may run: leave out -n")
