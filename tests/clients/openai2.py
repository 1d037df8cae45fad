"""openai 2, litellm and langchain-openai against a running cluster: `python openai2.py URL`.

Runs in the virtual environment of requirements.txt, so it imports nothing of kvlane.
"""

from __future__ import annotations

import sys

import litellm
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai_checks import QUESTION, USER, run_checks


def check_litellm(url: str) -> None:
    made = litellm.completion(
        model="openai/tiny", api_base=f"{url}/v1", api_key="none", messages=USER, temperature=0
    )
    text = made.choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in litellm.completion(
            model="openai/tiny", api_base=f"{url}/v1", api_key="none", messages=USER,
            temperature=0, stream=True, stream_options={"include_usage": True},
        )
        if chunk.choices
    ]  # fmt: skip
    assert "".join(pieces) == text
    assert made.usage.prompt_tokens > 0


def check_langchain(url: str) -> None:
    model = ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, stream_usage=True
    )
    text = model.invoke([HumanMessage(QUESTION)]).content
    assert "".join(chunk.content for chunk in model.stream([HumanMessage(QUESTION)])) == text


if __name__ == "__main__":
    for check in (run_checks, check_litellm, check_langchain):
        check(sys.argv[1])
        print("passed", check.__name__)
