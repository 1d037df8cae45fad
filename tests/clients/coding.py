"""Coding agents: a turn of each against a server, and whether the model has called a tool in it.

Nothing here forces a call: `coding.toml` has what the agents are told, as router/AGENTS.md says it.
"""

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.relay import Exchange, relay

LIMIT_S = 900  # of a turn
ASKS = re.compile(r"/v1/(?:chat/completions|responses|messages)(?:\?|$)")
CALLS = "tool_use", "function_call", "custom_tool_call"


@dataclass(frozen=True, slots=True)
class Agent:
    """A table of coding.toml."""

    package: str
    speaks: str
    program: str
    arguments: str
    has_tools: bool = True
    env: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def of_npm(self) -> bool:
        return self.program.startswith("node_modules")

    def version(self, place: Path) -> str:
        """Of what is installed in `place`."""
        if self.of_npm:
            file = place / "node_modules" / self.package / "package.json"
            return json.loads(file.read_text())["version"]
        name = self.package.partition("[")[0].replace("-", "_")
        (found,) = place.glob(f"lib/python3*/site-packages/{name}-*.dist-info")
        return found.name.removesuffix(".dist-info").rpartition("-")[2]

    def take_turn(self, place: Path, port: int, home: Path) -> str:
        """What the turn lacks, "" if nothing; the agent writes below `home` alone."""
        kept = list[Exchange]()
        (work := home / "work").mkdir(parents=True)
        with relay(port, kept) as url, (home / "output").open("wb") as output:
            for name, text in self.files.items():
                (home / name).parent.mkdir(exist_ok=True)
                (home / name).write_text(text.replace("$URL", url))
            command = [str(min(place.glob(self.program))), *shlex.split(self.arguments)]
            env = dict.fromkeys(("HOME", "TMPDIR"), str(home)) | {"PATH": os.environ["PATH"]}
            env |= {name: value.replace("$URL", url) for name, value in self.env.items()}
            quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            try:
                subprocess.run(command, cwd=work, env=env, timeout=LIMIT_S, check=True, **quiet)
            except subprocess.SubprocessError as error:
                why = f"exit code {getattr(error, 'returncode', 'none in time')}"
                return lacks(kept, why, has_tools=self.has_tools)
        return lacks(kept, has_tools=self.has_tools)


AGENTS = {
    name: Agent(**table)
    for name, table in tomllib.loads(Path(__file__).with_name("coding.toml").read_text()).items()
}


def lacks(kept: list[Exchange], *more: str, has_tools: bool = True) -> str:
    """Why these exchanges are no turn with a call of a tool that the agent has, "" if they are one.

    more: what else is wrong. Without tools it must reach the model, and offer none.
    """
    asked = [one for one in kept if ASKS.search(one.path)]
    found = [f"{one.path}: {one.status} {one.answer[:200]}" for one in kept if one.status != 200]
    called = [(name, offered(one.asked)) for one in asked for name in calls(one.answer)]
    if asked and not has_tools:
        found += ["it has tools by now"] * any(offered(one.asked) for one in asked)
    elif not any(name in names for name, names in called):
        told = ", ".join(sorted({name for name, _ in called})) or "nothing"
        found.append(f"called {told}" if asked else "has not reached the model")
    return "; ".join([*found, *more])


def offered(body: bytes) -> set[str]:
    """Names of the tools of a request, those in namespaces among them."""
    tools = json.loads(body).get("tools") or []
    return {str(each["name"]) for each in objects(tools) if "name" in each}


def calls(answer: str) -> set[str]:
    """Names of what an answer calls, whole or in events."""
    parts = [line.removeprefix("data:") for line in answer.splitlines() if line.startswith("data:")]
    found = set[str]()
    for part in parts or [answer]:
        try:
            held = list(objects(json.loads(part)))
        except ValueError:
            continue  # `[DONE]`
        found |= {str(each["name"]) for each in held if each.get("type") in CALLS}
        chat = [call for each in held for call in each.get("tool_calls") or []]
        found |= {name for call in chat if (name := call.get("function", {}).get("name"))}
    return found


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """All JSON objects in a value."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, (dict, list)):
            yield from objects(each)
