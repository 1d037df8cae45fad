"""Stored responses of several routers against a model of them: a dictionary.

python -m tests.support.stored_model --routers 4 --operations 10000 --seed 7
"""

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from router.http.app import RouterServer
from router.text.tokenizer import Text
from tests.fault.router_doubles import CHATML, DecodeDouble, make_model, num_live
from tests.support.meeting import introduce
from tests.support.patience import HANG_S, until
from tests.support.router_process import router_at
from worker.api import FinishReason, Generate, Member, WorkerStats

KEYS = {"alice": "sk-a", "bob": "sk-b"}
WORDS = ("one", "two", "the fox", "hello", "stop here", "the end")
MAX_TURNS, MAX_MAKING = 8, 16
Turn = tuple[str, str]  # role and text


def model_for_it(directory: Path) -> Path:
    return make_model(directory, CHATML, (), 4096)


@dataclass
class Stored:
    """A response as it must be."""

    owner: str
    before: list[Turn]
    said: str
    text: str | None  # None: it is being made
    status: str
    is_background: bool
    is_deleted: bool = False

    @property
    def turns(self) -> list[Turn]:
        """Those with which a next one begins."""
        own = [("user", self.said)]
        return [*self.before, *own, *([("assistant", self.text)] if self.text else [])]


@dataclass
class Several:
    """Routers of this process, and a worker that answers with `word`, or waits."""

    directory: Path
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    word: str = ""
    waits: bool = False
    prompts: list[str] = field(default_factory=list[str])
    waiting: list[tuple[str, Generate]] = field(default_factory=list[tuple[str, Generate]])
    routers: dict[str, RouterServer] = field(default_factory=dict[str, RouterServer])
    members: dict[str, Member] = field(default_factory=dict[str, Member])

    def __post_init__(self) -> None:
        self.text = Text(self.directory)
        rows = WorkerStats(max_num_reqs=256, num_free_pages=1000, num_pages=1000)
        self.double = DecodeDouble(script=self._answer, stats=rows)

    def _answer(self, double: DecodeDouble, peer: str, generate: Generate) -> None:
        self.prompts.append(self.text.decode(generate.tokens, skip_special_tokens=False))
        if self.waits:
            self.waiting.append((peer, generate))
        else:
            self.finish(peer, generate)

    def finish(self, peer: str, generate: Generate) -> None:
        """Answer what was asked."""
        tokens = self.text.encode(self.word, add_special_tokens=False)
        self.double.chunk(peer, generate, tokens, finish=FinishReason.STOP)

    def start(self, *names: str) -> None:
        """Routers of these names, which know all others."""
        for name in names:
            router = router_at(self.directory, name, shared=False, **self.options)
            self.routers[name], self.members[name] = router, introduce(router.start())
        self.tell()
        for name in names:
            until(lambda name=name: num_live(self.url(name)) == 1)

    def url(self, name: str) -> str:
        return self.members[name].address

    def tell(self) -> None:
        """All who is there."""
        for router in self.routers.values():
            router.update_members([*self.members.values(), self.double.member])

    def stop(self, name: str) -> None:
        """In peace; the others hear of it when it has ended, as the controller has it."""
        self.routers.pop(name).stop()
        del self.members[name]
        self.tell()

    def end(self) -> None:
        for name in list(self.routers):
            self.stop(name)
        self.double.die()


class Law:
    """Does one thing after another to both."""

    def __init__(self, several: Several, num: int, seed: int) -> None:
        self.several, self.rng = several, random.Random(seed)
        self.stored: dict[str, Stored] = {}
        self.making: dict[str, tuple[str, Generate]] = {}
        self.num_done, self.num_started = Counter[str](), num
        self._http = httpx.Client(timeout=HANG_S)
        several.start(*(f"router-{i}" for i in range(num)))
        self._deeds = {
            self.create: 22, self.go_on: 22, self.get: 22, self.items: 8, self.delete: 8,
            self.cancel: 6, self.finish: 8, self.count: 4, self.refer: 3, self.compact: 2,
        }  # fmt: skip

    def run(self, num: int) -> None:
        for i in range(num):
            if i and i % 500 == 0:
                self.renew()
            while len(self.making) > MAX_MAKING:
                self.finish()
            (deed,) = self.rng.choices([*self._deeds], [*self._deeds.values()])
            deed()
            self.num_done[deed.__name__] += 1
        self._http.close()

    def ask(self, method: str, path: str, owner: str, body: Any = None) -> httpx.Response:
        url = self.several.url(self.rng.choice([*self.several.members]))
        headers = {"authorization": f"Bearer {KEYS[owner]}"}
        answer = self._http.request(method, f"{url}/v1/responses{path}", headers=headers, json=body)
        assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
        return answer

    def some(self) -> tuple[str, Stored | None, str]:
        """A name, what is there of it for who asks, and who asks."""
        owner = self.rng.choice([*KEYS])
        recent = [*self.stored][-30:] if self.rng.random() < 0.8 else [*self.stored]
        if not recent or self.rng.random() < 0.05:
            unknown = self.rng.choice(["resp_x", "resp_-00000000", "cmp_1-2"])
            return unknown, None, owner
        name = self.rng.choice(recent)
        found = self.stored[name]
        if self.rng.random() < 0.9:
            owner = found.owner
        return name, None if found.is_deleted or found.owner != owner else found, owner

    def make(self, owner: str, before: list[Turn], body: dict[str, Any], turns: list[Turn]) -> None:
        """A response that goes on with these turns."""
        waits, keeps = self.rng.random() < 0.2, self.rng.random() < 0.9
        self.several.word, self.several.waits = self.rng.choice(WORDS), waits
        num, said = len(self.several.prompts), turns[-1][1]
        body = {"model": "small", "input": said, **body, "background": waits}
        answer = self.ask("POST", "", owner, body | {"store": waits or keeps})
        assert answer.status_code == 200, answer.text
        made = answer.json()
        until(lambda: len(self.several.prompts) > num)
        assert self.several.prompts[-1] == written(turns)
        stored = Stored(owner, turns[:-1], said, None, "in_progress", waits)
        if waits:
            self.making[made["id"]] = self.several.waiting.pop()
        else:
            stored.text, stored.status = self.several.word, "completed"
        stored.is_deleted = not (waits or keeps)
        assert made["id"] not in self.stored
        self.stored[made["id"]] = stored
        assert told(made) == as_told(made["id"], stored)

    def create(self) -> None:
        owner = self.rng.choice([*KEYS])
        self.make(owner, [], {}, [("user", self.rng.choice(WORDS))])

    def go_on(self) -> None:
        name, found, owner = self.some()
        if found is not None and len(found.turns) > MAX_TURNS:
            return
        said = ("user", self.rng.choice(WORDS))
        if found is None:
            body = {"input": "a", "previous_response_id": name}
            self.missing(self.ask("POST", "", owner, body), "previous_response_id")
        else:
            more = {"previous_response_id": name}
            self.make(owner, found.turns, more, [*found.turns, said])

    def refer(self) -> None:
        name, found, owner = self.some()
        item = f"msg_{name.removeprefix('resp_')}-0"
        asked = [{"type": "item_reference", "id": item}, {"role": "user", "content": "two"}]
        if found is None or not found.text:
            self.missing(self.ask("POST", "", owner, {"input": asked}), "input.0.id")
            return
        turns = [("assistant", found.text), ("user", "two")]
        self.make(owner, [], {"input": asked}, turns)
        made = [*self.stored][-1]  # its input is two items
        self.stored[made].is_deleted = True
        self.ask("DELETE", f"/{made}", owner)
        self.making.pop(made, None)

    def get(self) -> None:
        name, found, owner = self.some()
        answer = self.ask("GET", f"/{name}", owner)
        if found is None:
            self.missing(answer)
        else:
            assert told(answer.json()) == as_told(name, found)

    def items(self) -> None:
        name, found, owner = self.some()
        answer = self.ask("GET", f"/{name}/input_items", owner)
        if found is None:
            self.missing(answer)
        else:
            (item,) = answer.json()["data"]
            assert (item["role"], item["content"]) == ("user", found.said)

    def count(self) -> None:
        name, found, owner = self.some()
        body = {"previous_response_id": name, "input": "one"}
        answer = self.ask("POST", "/input_tokens", owner, body)
        if found is None:
            self.missing(answer, "previous_response_id")
        else:
            text = written([*found.turns, ("user", "one")])
            num = len(self.several.text.encode(text, add_special_tokens=False))
            assert answer.json()["input_tokens"] == num

    def compact(self) -> None:
        name, found, owner = self.some()
        self.several.word, self.several.waits = "the end", False
        answer = self.ask("POST", "/compact", owner, {"previous_response_id": name})
        if found is None:
            self.missing(answer, "previous_response_id")
        else:
            *said, summary = answer.json()["output"]
            asked = [text for role, text in found.turns if role == "user"]
            assert [item["content"][0]["text"] for item in said] == asked
            assert summary["encrypted_content"].endswith("the end")

    def delete(self) -> None:
        name, found, owner = self.some()
        answer = self.ask("DELETE", f"/{name}", owner)
        if found is None:
            self.missing(answer)
        else:
            assert answer.json()["deleted"] is True
            found.is_deleted = True
            self.making.pop(name, None)

    def cancel(self) -> None:
        name, found, owner = self.some()
        answer = self.ask("POST", f"/{name}/cancel", owner)
        if found is None:
            self.missing(answer)
        elif not found.is_background:
            assert answer.status_code == 400
        else:
            if self.making.pop(name, None) is not None:
                found.status = "cancelled"
            assert told(answer.json()) == as_told(name, found)

    def finish(self) -> None:
        """One that is being made."""
        if not self.making:
            return
        name = self.rng.choice([*self.making])
        self.several.word = self.rng.choice(WORDS)
        self.several.finish(*self.making.pop(name))
        found = self.stored[name]
        found.text, found.status = self.several.word, "completed"

        def is_done() -> bool:
            return self.ask("GET", f"/{name}", found.owner).json()["status"] != "in_progress"

        until(is_done)

    def renew(self) -> None:
        """A router leaves, and another one comes."""
        while self.making:
            self.finish()
        self.several.stop(self.rng.choice([*self.several.members]))
        self.several.start(f"router-{self.num_started}")
        self.num_started += 1
        self.num_done["renew"] += 1

    def missing(self, answer: httpx.Response, param: str | None = None) -> None:
        assert answer.status_code == 404, (answer.status_code, answer.text)
        assert answer.json()["error"]["param"] == param


def written(turns: Sequence[Turn]) -> str:
    """As the template writes it."""
    said = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns]
    return "".join(said) + "<|im_start|>assistant\n"


def told(response: Any) -> tuple[Any, ...]:
    """What both know of a response."""
    texts = [item["content"][0]["text"] for item in response["output"]]
    return response["id"], response["status"], texts, response["background"]


def as_told(name: str, stored: Stored) -> tuple[Any, ...]:
    return name, stored.status, [stored.text] if stored.text else [], stored.is_background


def equal(directory: Path, keys: Path, *, num: int, operations: int, seed: int) -> Counter[str]:
    """Raises an AssertionError where they differ; how often what was done."""
    keys.write_text("".join(f"{secret} name={name}\n" for name, secret in KEYS.items()))
    with ExitStack() as stack:
        several = Several(directory, {"api_key_file": str(keys)})
        stack.callback(several.end)
        law = Law(several, num, seed)
        law.run(operations)
    return law.num_done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        place = model_for_it(Path(root) / "model")
        print(equal(place, Path(root) / "keys", num=args.routers, operations=args.operations,
                    seed=args.seed))  # fmt: skip
