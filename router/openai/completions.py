"""POST /v1/completions: prompts as text or token ids, answers to text choices."""

from collections.abc import Sequence

from router.dispatch.mailbox import Delta
from router.openai.body import AnswerWriter
from router.openai.logprobs import BytesOf, text_logprobs
from router.openai.reply import Choice, TextChoice, TextLogprobs
from router.openai.schema import CompletionBody
from router.openai.served import Served
from router.text.tokenizer import Text
from worker.api import FinishReason, TokenLogprob


class TextWriter(AnswerWriter):
    """Text completions; chunks have the same form.

    `echoes`: the prompts that choices repeat before their own text; empty without echo.
    `bytes_of` is None when no logprobs are wanted.
    """

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_one_prompt = False

    def __init__(
        self,
        echoes: Sequence[str],
        bytes_of: BytesOf | None,
        prompts: Sequence[tuple[int, ...]] = (),
        num_top: int = 0,
    ) -> None:
        """prompts: of choices, if they are echoed with logprobs; num_top: alternatives."""
        self._prompts, self._num_top = prompts, num_top
        self._echoes = echoes
        self._bytes_of = bytes_of
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens written

    def opening(self, delta: Delta) -> Choice | None:
        if not self._echoes:
            return None
        return self._choice(delta.index, self._echoes[delta.index], self._echoed(delta))

    def chunk(self, delta: Delta) -> Choice:
        return self._choice(delta.index, delta.text, delta.scored, delta.finish_reason)

    def whole(self, index: int, delta: Delta) -> Choice:
        text = self._echoes[delta.index] + delta.text if self._echoes else delta.text
        scored = (*self._echoed(delta), *delta.scored)
        return self._choice(index, text, scored, delta.finish_reason)

    def _echoed(self, delta: Delta) -> Sequence[tuple[int, TokenLogprob | None]]:
        """The tokens of the prompt with their logprobs, if these are echoed."""
        return ((self._prompts[delta.index][0], None), *delta.prompt) if self._prompts else ()

    def _choice(
        self,
        index: int,
        text: str,
        scored: Sequence[tuple[int, TokenLogprob | None]],
        finish_reason: FinishReason | None = None,
    ) -> TextChoice:
        logprobs: TextLogprobs | None = None
        if scored and self._bytes_of is not None:
            offset = self._offsets.get(index, 0)
            logprobs = text_logprobs(scored, self._bytes_of, offset, self._num_top)
            self._offsets[index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)


def prompts(body: CompletionBody, served: Served, salt: str) -> list[tuple[int, ...]]:
    """Every prompt; raises an ApiError if one is too long, or a token id does not exist."""
    adds = body.add_special_tokens is not False
    tokens: list[tuple[int, ...]] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            tokens.append(served.encode(prompt, "prompt", adds=adds, salt=salt))
        else:
            served.check_tokens(prompt, "prompt")
            tokens.append(tuple(prompt))
    return tokens


def echoes(body: CompletionBody, prompts: Sequence[tuple[int, ...]], text: Text) -> list[str]:
    """What choices repeat before their own text, of a prompt that was cut what is left of it."""
    if not body.echo:
        return []
    is_cut = body.truncate_prompt_tokens is not None
    shown = [
        prompt if isinstance(prompt, str) and not is_cut else text.decode(tokens)
        for prompt, tokens in zip(body.prompt, prompts, strict=True)
    ]
    return [prompt for prompt in shown for _ in range(body.num_samples)]
