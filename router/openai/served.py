"""What the API's endpoints know of the model that they serve."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from router.config import RouterConfig
from router.dispatch.members import Members
from router.openai.defaults import Defaults
from router.text.tokenizer import Text


@dataclass(frozen=True, slots=True)
class Served:
    """The model of a router, and the limits of its requests."""

    model: str  # the served name
    text: Text
    config: RouterConfig
    members: Members
    model_max_len: int  # by the configuration; a worker's KV pool may hold less
    defaults: Defaults = field(default_factory=Defaults)  # of sampling
    started_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int:
        """Prompt + output tokens that every live decode worker can serve."""
        return min([self.model_max_len, *self.members.max_model_lens()])

    @property
    def simulated_accept_len(self) -> float:
        """The most of any decode worker; above 0, answers are junk (`Member`)."""
        return max((k.member.simulated_accept_len for k in self.members.all()), default=0.0)
