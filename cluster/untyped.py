"""Ray without its partial annotations: strict typing ends at this name, and is cast back there."""

from typing import Any

import ray

RAY: Any = ray
