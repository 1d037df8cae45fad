"""instructor against a running cluster: `python instructor_checks.py URL`."""

from collections.abc import Iterator
from typing import Any

import instructor
import openai
from shared import CHATS, USER, Add, Solution, main, text_of

ASKED: Any = {"model": "tiny", "messages": USER, "max_retries": 0}


class Instructor:
    def __init__(self, url: str) -> None:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
        self.clients: list[Any] = [instructor.from_openai(client, mode=mode) for mode in modes]

    def texts(self) -> Iterator[str]:
        made = self.clients[0].chat.completions.create(**ASKED, response_model=None)
        yield made.choices[0].message.content

    def streams(self) -> Iterator[list[str]]:
        chunks = self.clients[0].chat.completions.create(**ASKED, response_model=None, stream=True)
        yield [text_of([chunk]) for chunk in chunks]
        for client in self.clients:
            grown = list(client.create_partial(**ASKED, response_model=Solution, strict=False))
            assert len(grown) > 5
            Solution.model_validate(grown[-1].model_dump())

    def calls(self) -> Iterator[dict[str, int]]:
        create = self.clients[0].create
        yield create(**ASKED, response_model=Add).model_dump()
        for seed in range(8):  # how many, none too, is the model's choice
            asked = {**ASKED, "response_model": Add, "seed": seed, "temperature": 2}
            for call in self.clients[0].create_iterable(**asked):
                yield call.model_dump()

    def solutions(self) -> Iterator[Any]:
        for client in self.clients:
            made, raw = client.create_with_completion(**ASKED, response_model=Solution)
            assert raw.usage.completion_tokens > 0
            yield made


if __name__ == "__main__":
    main("instructor", *CHATS, connect=Instructor)
