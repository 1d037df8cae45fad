"""Chats that hold the word problems and plain dialogue, in the ChatML form of the model `tiny`."""

import random
from typing import NamedTuple

from benchmarks.train import problems, words
from benchmarks.train.arithmetic import Inexact, evaluate, worked

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
HIDDEN = "\0"
SYSTEM_SHARE = 0.25
_SUM_ASKS = ("What is {}?", "what is {}", "{} = ?", "{}", "Compute {}.", "How much is {}?", "{}=")


class Turn(NamedTuple):
    """What the user says and what the model answers.

    In an answer every second of the parts that HIDDEN separates is a grammar's, not the model's.
    """

    user: str
    assistant: str


class Chat(NamedTuple):
    """A conversation; `system` is None where there is no system message.

    `calls` stands behind what the user says, results of tools aside (see tools.py).
    """

    system: str | None
    turns: list[Turn]
    calls: str = ""

    def segments(self) -> list[str]:
        """The chat as text, cut so that every odd segment is an answer the model must learn.

        An answer includes its closing <|im_end|>; joined, the segments are what the chat template
        of the tokenizer renders.
        """
        head = f"{TURN_START}system\n{self.system}{TURN_END}\n" if self.system else ""
        listed = f"{TURN_START}tools\n{self.calls}{TURN_END}\n" if self.calls else ""
        parts: list[str] = []
        for user, assistant in self.turns:
            asked = f"{user}{TURN_END}\n{'' if user.startswith('<tool_response>') else listed}"
            parts.append(f"{head}{TURN_START}user\n{asked}{TURN_START}assistant\n")
            parts += f"{assistant}{TURN_END}".split(HIDDEN)
            head = "\n"
        return parts


def short_chat(rng: random.Random) -> Chat:
    """A chat of mostly one problem, or of plain dialogue."""
    kind = rng.random()
    if kind < 0.82:
        turns = [problem_turn(rng)]
    elif kind < 0.90:
        turns = [sum_turn(rng)]
    else:
        turns = [talk_turn(rng) for _ in range(rng.choice((1, 1, 2)))]
    return Chat(draw_system(rng), turns)


def long_chat(rng: random.Random) -> Chat:
    """A chat of two to six turns: problems, with greetings, thanks and sums between them."""
    turns = [talk_turn(rng, "greet")] if rng.random() < 0.15 else []
    for _ in range(rng.randint(2, 6)):
        kind = rng.random()
        if kind < 0.80:
            turns.append(problem_turn(rng))
        elif kind < 0.87:
            turns.append(talk_turn(rng, "thanks"))
        elif kind < 0.94:
            turns.append(talk_turn(rng))
        else:
            turns.append(sum_turn(rng))
    return Chat(draw_system(rng), turns)


def draw_system(rng: random.Random) -> str | None:
    """A system message for a part of the chats."""
    return rng.choice(words.read("dialogue")["systems"]) if rng.random() < SYSTEM_SHARE else None


def problem_turn(rng: random.Random) -> Turn:
    """A word problem of the training split."""
    problem = problems.training_problem(rng)
    return Turn(problem.question, problem.answer)


def sum_turn(rng: random.Random) -> Turn:
    """A bare operation, such as "What is 12 * 7?"."""
    while True:
        op = rng.choice("+-*/")
        left, right = rng.randint(1, 999), rng.randint(1, 999)
        if op in "*/":
            left, right = rng.randint(1, 99), rng.randint(1, 9)
        if op == "/":
            left *= right
        try:
            value = evaluate(left, op, right)
        except Inexact:
            continue
        answer = f"Result: {worked(left, op, right)}.\n#### {value}"
        return Turn(rng.choice(_SUM_ASKS).format(f"{left} {op} {right}"), answer)


def talk_turn(rng: random.Random, topic: str | None = None) -> Turn:
    """Plain dialogue of one topic, or of any."""
    talks = {name: entry for name, entry in words.read("dialogue").items() if name != "systems"}
    talk = talks[topic] if topic else rng.choice(list(talks.values()))
    name = rng.choice(words.NAMES)
    return Turn(rng.choice(talk["users"]).format(N=name), talk["reply"].format(N=name))
