"""instructor against a running cluster: `python instructor_checks.py URL`."""

from typing import Any

import instructor
import openai
from shared import ANSWER, USER, Add, Solution, main, text_of

MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)


def model(url: str, mode: instructor.Mode = instructor.Mode.TOOLS) -> Any:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_retries": 0, **more}


def chat(url: str) -> None:
    made = model(url).chat.completions.create(**asked(response_model=None))
    assert made.choices[0].message.content.endswith(ANSWER)


def stream(url: str) -> None:
    chunks = model(url).chat.completions.create(**asked(response_model=None, stream=True))
    assert text_of(chunks).endswith(ANSWER)
    for mode in MODES:
        more = asked(response_model=Solution, strict=False)
        grown = list(model(url, mode).create_partial(**more))
        assert len(grown) > 5
        Solution.model_validate(grown[-1].model_dump())


def tools(url: str) -> None:
    assert isinstance(model(url).create(**asked(response_model=Add)), Add)
    calls = [  # how many, none too, is the model's choice
        call
        for seed in range(8)
        for call in model(url).create_iterable(
            **asked(response_model=Add, seed=seed, temperature=2)
        )
    ]
    assert calls
    assert all(isinstance(call, Add) for call in calls)


def structured_output(url: str) -> None:
    for mode in MODES:
        made, raw = model(url, mode).create_with_completion(**asked(response_model=Solution))
        assert isinstance(made, Solution), mode
        assert raw.usage.completion_tokens > 0


if __name__ == "__main__":
    main("instructor", chat, stream, tools, structured_output)
