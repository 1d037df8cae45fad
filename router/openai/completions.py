"""POST /v1/completions: prompts as text or token ids, answers to text choices."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.dispatch.mailbox import Delta
from router.openai.body import AnswerWriter
from router.openai.logprobs import BytesOf, starts_in, text_logprobs
from router.openai.reply import Choice, TextChoice, TextLogprobs
from router.openai.schema import CompletionBody
from router.openai.served import Served
from router.text.tokenizer import Text
from worker.api import TokenLogprob


class TextWriter(AnswerWriter):
    """Text completions; chunks have the same form.

    `echoes`: the prompts that choices repeat before their own text; empty without echo.
    `bytes_of` is None when no logprobs are wanted.
    """

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_one_prompt = opens_together = False

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
        self._texts: dict[int, _Told] = {}  # by choice

    def opening(self, delta: Delta) -> Choice | None:
        if not self._echoes:
            return None
        return self._choice(Delta(delta.index, prompt=delta.prompt), self._echoes[delta.index])

    def chunks(self, delta: Delta) -> Sequence[Choice]:
        return (self._choice(delta),)

    def whole(self, index: int, delta: Delta) -> Choice:
        choice = self._choice(delta, self._echoes[delta.index] if self._echoes else "")
        choice.index = index
        return choice

    def _choice(self, delta: Delta, echo: str = "") -> TextChoice:
        """echo: what comes before the delta's text, its prompt."""
        index, text, reason = delta.index, echo + delta.text, delta.finish_reason
        logprobs: TextLogprobs | None = None
        if self._bytes_of is not None:
            told = self._texts.setdefault(index, _Told())
            if echo and self._prompts:
                prompt = self._prompts[index]
                starts = starts_in(echo, prompt, self._bytes_of)
                told.held += zip(starts, ((prompt[0], None), *delta.prompt), strict=False)
            told.num_echoed += len(echo)
            starts = (told.num_echoed + start for start in delta.starts)
            told.held += zip(starts, delta.scored, strict=True)
            told.num_chars += len(text)
            scored, offsets = told.take(is_last=reason is not None)
            if scored:
                logprobs = text_logprobs(scored, self._bytes_of, offsets, self._num_top)
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)


Token = tuple[int, TokenLogprob | None]


@dataclass(slots=True)
class _Told:
    """What was told of a choice: tokens wait until the text where they begin is told, too."""

    num_chars: int = 0
    num_echoed: int = 0
    held: list[tuple[int, Token]] = field(default_factory=list[tuple[int, Token]])

    def take(self, *, is_last: bool) -> tuple[list[Token], list[int]]:
        """Tokens that may be told, and their offsets: a stop string's have the end of the text."""
        waits = (i for i, (start, _) in enumerate(self.held) if start > self.num_chars)
        num = len(self.held) if is_last else next(waits, len(self.held))
        told, self.held = self.held[:num], self.held[num:]
        return [scored for _, scored in told], [min(at, self.num_chars) for at, _ in told]


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
