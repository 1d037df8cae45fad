"""Probes the machine that this process runs on."""

from __future__ import annotations

import os
import socket

import torch

from worker.config import Machine


def probe() -> Machine:
    """Look at the device, its memory and the CPUs that this process may use."""
    cuda = torch.cuda.is_available()
    if cuda:
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = os.environ.get("OMP_NUM_THREADS", "")  # Ray sets it to the number of CPUs granted
    num_cpus = int(threads) if threads.isdigit() else len(os.sched_getaffinity(0))
    return Machine("cuda" if cuda else "cpu", max(1, num_cpus), memory, socket.gethostname())
