"""Agents' sessions with stated parameters: `agents:PRESET[,SCALE[,TURNS]]`.

    aiperf     as the configuration that AIPerf publishes: few long turns
    tracelab   as TraceLab's 357,161 steps: many short ones, with subagents

Every session begins with a system prompt and tools that all have, a repository's text that its
group has, and files of its own. Each turn appends what a tool has returned and asks for an answer;
behind it the agent waits for a tool, or for a person. A subagent is a short session of its own with
the same beginning; when it starts is not tied to its parent. Lengths in tokens are divided by SCALE
(1; 16 for a CPU), TURNS is the mean of turns a session.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from benchmarks.load.lengths import number
from benchmarks.load.prompts import TEMPLATE_TOKENS, Options, exactly
from benchmarks.load.records import Session, Turn
from benchmarks.load.words import Words

SYSTEM, GROUP = 3, 4  # first number of the keys of texts after the seed
SUBAGENT_TURNS = 3


@dataclass(frozen=True, slots=True)
class Law:
    """A lognormal one, by median and mean."""

    median: float
    mean: float
    most: float = math.inf

    def draw(self, rng: Generator) -> float:
        """One value."""
        sigma = math.sqrt(2 * math.log(self.mean / self.median))
        return min(self.most, float(rng.lognormal(math.log(self.median), sigma)))


@dataclass(frozen=True, slots=True)
class Preset:
    """What sessions are like; lengths in tokens, pauses in seconds."""

    append: Law
    output: Law
    turns: float  # mean, of a geometric law: any turn may be the last
    human: float  # share of the pauses that are a person's
    subagents: float  # a turn
    system: int = 32_000
    repository: int = 10_000
    groups: int = 100
    zipf: float = 0.6  # of groups: how often the n-th is asked about, n to the minus this
    files: Law = Law(5_000, 15_000, 50_000)
    tool_pause: Law = Law(2, 5)
    human_pause: Law = Law(15, 30)


PRESETS = {
    "aiperf": Preset(Law(4_000, 6_000), Law(800, 1_000), turns=20, human=0.3, subagents=0.0),
    # Their figures of outputs, turns and appended tokens; pauses, which nobody has published, and
    # subagents are guesses.
    "tracelab": Preset(Law(800, 2_224), Law(300, 500), turns=80, human=0.2, subagents=0.1),
}


def preset(rest: str) -> tuple[Preset, float]:
    """The preset and scale of `PRESET[,SCALE[,TURNS]]`; ValueError names the part that is wrong."""
    name, *numbers = rest.split(",")
    if name not in PRESETS or len(numbers) > 2:
        raise ValueError(f"agents: the form is agents:{'|'.join(PRESETS)}[,SCALE[,TURNS]]")
    chosen, scale = PRESETS[name], 1.0
    if numbers:
        scale = number(numbers[0], "agents: SCALE", above=True)
    if numbers[1:]:
        chosen = replace(chosen, turns=number(numbers[1], "agents: TURNS", low=1))
    return chosen, scale


def sessions(
    rest: str, words: Words | None, options: Options, seed: int, num: int
) -> list[Session]:
    """`num` sessions, subagents among them; raises ValueError as `preset`, or without `words`."""
    chosen, scale = preset(rest)
    if words is None:
        raise ValueError("agents: needs a tokenizer")
    rng = np.random.default_rng(seed)
    odds = np.arange(1, chosen.groups + 1) ** -chosen.zipf
    made: list[Session] = []

    def tokens(mean: float) -> int:
        return max(1, round(mean / scale))

    def session(group: int, num_turns: int) -> Session:
        turns, used = list[Turn](), 0
        for index in range(num_turns):
            shared: list[str] = []
            if not index:
                shared = words.fixed((seed, SYSTEM), tokens(chosen.system))
                shared += words.fixed((seed, GROUP, group), tokens(chosen.repository))
            own = chosen.append.draw(rng) + (0 if index else chosen.files.draw(rng))
            num_in, num_out = len(shared) + tokens(own), tokens(chosen.output.draw(rng))
            room = options.room(used)
            if room is not None and num_in + num_out > room:
                if not index:
                    raise ValueError(f"agents: a first turn needs {num_in + num_out} tokens: SCALE")
                break
            text = " ".join([*shared, *words.stream(rng, tokens(own))])
            law = chosen.human_pause if rng.random() < chosen.human else chosen.tool_pause
            pause_s = law.draw(rng) * options.time_scale if index else 0.0
            glue = " " if index and not options.chat else ""
            turns.append(Turn(glue + text, num_out, pause_s, exactly(num_out), num_in))
            used += num_in + num_out + TEMPLATE_TOKENS
        return Session(tuple(turns))

    while len(made) < num:
        group = int(rng.choice(chosen.groups, p=odds / odds.sum()))
        made.append(session(group, int(rng.geometric(1 / chosen.turns))))
        for _ in range(int(rng.binomial(len(made[-1].turns), chosen.subagents))):
            made.append(session(group, int(rng.geometric(1 / SUBAGENT_TURNS))))
    return made[:num]
