"""Which keys a query row sees: constants of an attention backend's instance, and of its kernels."""

from dataclasses import dataclass, fields

KEY_BLOCK = 128  # the most keys that a kernel reads at a time, from a multiple of their number on


@dataclass(frozen=True, slots=True)
class KeyMask:
    """A row at position p, of a request with n keys, sees the keys k with first_key <= k <= p.

    Without `causal` it sees those up to n - 1, so a block of rows sees itself whole. With `window`
    it sees only keys k > p - window: itself and the window - 1 before it. A row that sees no key
    gives zeros.
    """

    first_key: int = 0  # 1: the region has no row for slot 0, as a chain drafter's
    causal: bool = True
    window: int | None = None  # tokens; None: all

    def __post_init__(self) -> None:
        assert self.first_key in (0, 1)
        assert self.window is None or self.window >= 1

    @property
    def unlike_causal(self) -> frozenset[str]:
        """The fields by which it differs from CAUSAL."""
        return frozenset(x.name for x in fields(self) if getattr(self, x.name) != x.default)

    def constants(self) -> dict[str, int]:
        """As constants of kernels; WINDOW is 0 if there is none."""
        return {"FIRST_KEY": self.first_key, "CAUSAL": self.causal, "WINDOW": self.window or 0}


CAUSAL = KeyMask()
