"""For pyright, to which the real one takes half a minute: here all of it is Any."""

from typing import Any

def __getattr__(name: str) -> Any: ...
