"""What tests of the router share: a small model, and a router with one worker for each module."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from router.text.tokenizer import Text
from tests.fault.router_doubles import (
    Ask,
    DecodeDouble,
    Script,
    Serve,
    Served,
    asking,
    client_of,
    letter_ids,
    make_model,
    serving,
)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory; nobody writes to it."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def usual_text(directory: Path) -> Text:
    """Its tokenizer."""
    return Text(directory)


@pytest.fixture(scope="module")
def text(
    request: pytest.FixtureRequest, usual_text: Text, tmp_path_factory: pytest.TempPathFactory
) -> Text:
    """The tokenizer of the module's MODEL, which is as `make_model` takes it; else the usual."""
    made = getattr(request.module, "MODEL", None)
    return Text(make_model(tmp_path_factory.mktemp("model"), *made)) if made else usual_text


@pytest.fixture(scope="session")
def ids(directory: Path) -> tuple[int, ...]:
    """Tokens "a" to "h"."""
    return letter_ids(directory)


def script_for(request: pytest.FixtureRequest, text: Text) -> Script | None:
    """The module's SCRIPT, or what its `script_of(text)` makes; else requests wait for `take`."""
    made = getattr(request.module, "script_of", None)
    return getattr(request.module, "SCRIPT", None) if made is None else made(text)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, text: Text) -> Iterator[Served]:
    """A router with the settings ROUTER of the module; its worker answers by its script."""
    double = DecodeDouble(script=script_for(request, text))
    with serving(text.directory, double, **getattr(request.module, "ROUTER", {})) as (router, url):
        yield Served(double, url, router)


@pytest.fixture
def double(request: pytest.FixtureRequest, served: Served, text: Text) -> DecodeDouble:
    """Its worker, as it was at first."""
    served.double.reset()
    served.double.script = script_for(request, text)
    return served.double


@pytest.fixture
def url(served: Served, double: DecodeDouble) -> str:
    """Of the router."""
    return served.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own."""
    with client_of(url) as found:
        yield found


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    """Both ways to answer."""
    return request.param


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Sends requests from threads."""
    with asking() as found:
        yield found


@pytest.fixture
def serve(directory: Path, ask: Ask) -> Iterator[Serve]:
    """Starts a router of the test's own: `double, url, router = serve(double, max_inflight=1)`."""
    with ExitStack() as stack:

        def start(*doubles: DecodeDouble, directory: Path = directory, **config: Any) -> Served:
            router, url = stack.enter_context(serving(directory, *doubles, **config))
            return Served(doubles[0] if doubles else None, url, router)  # type: ignore[arg-type]

        yield start  # before `ask` waits for what was asked
