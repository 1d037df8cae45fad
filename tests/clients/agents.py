"""Coding agents: a turn of each against a server, and whether the model has called a tool in it.

Nothing here forces a call: `agents.toml` has what the agents are told, as router/AGENTS.md says it.
"""

import json
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.relay import Exchange, relay

TASK = "Tom has 34 apples and buys 3 bags of 12 apples. How many apples does Tom have?"
LIMIT_S = 900  # of a turn
ASKS = re.compile(r"/v1/(?:chat/completions|responses|messages)(?:\?|$)")
CALLED = re.compile(r'"type": ?"(?:tool_use|(?:custom_tool|function)_call)"|"tool_calls": ?\[\{')


@dataclass(frozen=True, slots=True)
class Agent:
    """A table of agents.toml."""

    package: str
    speaks: str
    program: str
    arguments: str
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
        (home / "work").mkdir(parents=True)
        with relay(port, kept) as url, (home / "output").open("wb") as output:

            def told(text: str) -> str:
                return text.replace("URL", url).replace("TASK", TASK)

            for name, text in self.files.items():
                (home / name).parent.mkdir(exist_ok=True)
                (home / name).write_text(told(text))
            command = [str(min(place.glob(self.program))), *map(told, self.arguments.split())]
            env = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
            env |= {name: told(value) for name, value in self.env.items()}
            try:
                code = subprocess.call(
                    command, cwd=home / "work", env=env, timeout=LIMIT_S,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return lacks(kept, f"not ended in {LIMIT_S} s")
        return lacks(kept, f"exit code {code}" if code else "")


AGENTS = {
    name: Agent(**table)
    for name, table in tomllib.loads(Path(__file__).with_name("agents.toml").read_text()).items()
}


def lacks(kept: list[Exchange], how: str) -> str:
    """Why these exchanges are no turn with a call, "" if they are one; how: it ended badly."""
    asked = [one for one in kept if ASKS.search(one.path)]
    found = [f"{one.path}: {one.status} {one.answer[:200]}" for one in kept if one.status != 200]
    if not asked:
        found.append("has not reached the model")
    elif not any(CALLED.search(one.answer) for one in asked):
        found.append("reached the model, no call")
    return "; ".join([*found, *([how] if how else [])])
