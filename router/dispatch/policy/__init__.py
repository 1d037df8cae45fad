"""Routing policies by name."""

from router.dispatch.policy.base import Policy
from worker.registry import resolve

POLICIES = {
    "least_loaded": "router.dispatch.policy.least_loaded:LeastLoaded",
    "round_robin": "router.dispatch.policy.round_robin:RoundRobin",
}


def policy(name: str) -> Policy:
    """A fresh policy; raises a UserError that lists the names if there is none of this name."""
    return resolve("routing policy", name, POLICIES)()
