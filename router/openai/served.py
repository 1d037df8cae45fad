"""What the API's endpoints know of the model that they serve."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from router.config import RouterConfig
from router.dispatch.members import Members
from router.errors import ApiError, TooLong, invalid
from router.openai.defaults import Defaults
from router.openai.reply import Model
from router.text.speech import Speech
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
    speech: Speech = field(default_factory=Speech)  # how the model writes calls and reasoning
    started_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int:
        """Prompt + output tokens that every listed decode worker can serve."""
        lens = [k.member.max_model_len for k in self.members.all() if k.member.role == "decode"]
        return min([self.model_max_len, *filter(None, lens)])

    @property
    def simulated_accept_len(self) -> float:
        """The most of any decode worker; above 0, answers are junk (`Member`)."""
        return max((k.member.simulated_accept_len for k in self.members.all()), default=0.0)

    @property
    def card(self) -> Model:
        """The model, as it is shown to clients."""
        return Model(
            id=self.model,
            created=self.started_at,
            root=str(self.text.directory),
            max_model_len=self.max_model_len,
            default_sampling_params=self.defaults.model_dump(),
            simulated_accept_len=self.simulated_accept_len or UNSET,
        )

    def check_model(self, name: str) -> None:
        """Raise an ApiError, 404, for another model; its `root` and an empty name mean this one."""
        if name not in ("", self.model, str(self.text.directory)):
            message = f"the model {name!r} does not exist; {self.model!r} is served here"
            raise ApiError("model_not_found", message, param="model")

    def encode(self, prompt: str, param: str, *, adds: bool, salt: str = "") -> tuple[int, ...]:
        """The tokens of a prompt, and those that the tokenizer `adds`.

        400 for one far too long, or with a token that the model has not. salt: see Encoder.
        """
        limit = self.max_model_len
        if len(prompt) > limit * self.text.max_token_chars:
            least = f"at least {len(prompt) // self.text.max_token_chars}"
            raise TooLong(limit, f"your prompt has {len(prompt)} characters", least, param)
        tokens = self.text.encode(prompt, add_special_tokens=adds, salt=salt)
        unknown = self.text.unknown_ids
        if unknown and not unknown.keys().isdisjoint(tokens):
            token = unknown[next(token for token in tokens if token in unknown)]
            size = self.text.vocab_size
            message = f"the prompt has {token!r}, which only the tokenizer has: of the model's"
            raise invalid(f"{param}: {message} vocab_size of {size} it is beyond the end", param)
        return tokens

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise an ApiError, 400, for ids that the model does not have."""
        if not all(0 <= token < self.text.vocab_size for token in tokens):
            raise invalid(f"{param}: token ids must be in [0, {self.text.vocab_size})", param)
