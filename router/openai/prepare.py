"""From an HTTP body to a `Prepared` request: checks, template, tokenizer, grammar. Any thread."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from msgspec.structs import replace

from router.config import RouterConfig
from router.dispatch.queue import Req
from router.errors import TooLong, invalid, unsupported
from router.openai import chat, completions
from router.openai.body import AnswerWriter, Prepared
from router.openai.constraints import constraint_of
from router.openai.fields import listed, unheeded
from router.openai.logprobs import of_prompt
from router.openai.schema import ChatBody, CompletionBody, GenerationBody, parse, seed_of
from router.openai.served import Served
from router.openai.tools import Tools, answer_rules, call_rules, can_be_free, parser, tools_of
from router.text import harmony
from router.text.bounded import Bounds
from router.text.forms.free import Around
from router.text.forms.known import HARMONY
from router.text.forms.rules import CallRules
from router.text.grammar import Spelling, Validator, composed, regex, think_rules, unkept
from router.text.output import Ends
from router.text.parsers import FirstCallOnly, Parser, Plain
from router.text.reasoning import MARKS as THINKS
from router.text.reasoning import Answer, Reasoning

AUTO_STRING_CHARS = 256, 16384  # least and most; beyond 32768 llguidance gives up
AUTO_CALLS = 8, 128
# Whether an answer begins with reasoning: it may open it, or the prompt has.
Think = Literal["never", "maybe", "opened"]
# Of all choices of a request together, which workers get one by one.
MAX_SUMS = {
    "prompt tokens": 1 << 23, "biases": 1 << 20, "characters of grammars": 1 << 25,
    "logprobs of prompts": 1 << 20,
}  # fmt: skip


@dataclass(slots=True)
class _Job:
    """What one endpoint makes of a body, beside its prompts."""

    writer: AnswerWriter
    param: str  # the field with the prompts
    unheeded: Sequence[str]  # fields that have no effect
    grammar: str = ""
    grammar_param: str = ""  # the field that asks for the grammar
    unkept: Sequence[str] = ()  # parts of schemas that have no effect
    markers: Sequence[str] = ()  # written out although they may be special tokens
    over: Callable[[], Callable[[str], bool] | None] = lambda: None  # see `OutputText`
    salt: str = ""  # `Req.salt`


class Preparer:
    """Turns bodies into prepared requests. own_salt: `Key.own_salt` of who asks."""

    def __init__(self, served: Served, validator: Validator) -> None:
        self._served = served
        self._validator = validator
        speech = served.speech
        self._form, self._marks = speech.form, speech.marks  # None: these are not told apart
        source = served.text.template_source
        self._may_reason = any(marks.opens in source for marks in THINKS.values())
        self._bounds = _bounds(served.config, served.model_max_len, validator)
        sought = [*(self._marks or ()), *(() if self._form is None else self._form.texts())]
        sought += harmony.MARKS if self._form is HARMONY else ()
        # Special tokens that stand in what parsers look for: they are written out.
        special = (served.text.added[i] for i in served.text.special_ids)
        self._kept = [token for token in special if any(token in text for text in sought)]

    @property
    def think_end(self) -> int | None:
        """The token behind which reasoning has ended, if there is such a one."""
        return None if self._marks is None else self._served.text.token_of(self._marks[1])

    def chat(self, raw: bytes, own_salt: str = "") -> Prepared:
        """POST /v1/chat/completions; raises an ApiError or UserError that names the field."""
        return self.of_chat(parse(ChatBody, raw), own_salt)

    def of_chat(self, body: ChatBody, own_salt: str = "") -> Prepared:
        """A chat that is `checked`; raises as `chat` does."""
        self._served.check_model(body.model)
        ignored = self._unheeded(body)
        text, tools, salt = self._served.text, tools_of(body), body.salt(own_salt)
        if not (body.include_reasoning or self._marks) and self._may_reason:
            message = "include_reasoning: it is not told apart here (router.reasoning_parser)"
            raise unsupported(message, "include_reasoning")
        prompt = chat.rendered(body.messages, body, tools.given, text)
        think = self._think(prompt)
        if body.continue_final_message and think == "maybe" and self._marks is not None:
            opened = chat.is_thinking(body.messages[-1], self._marks)
            think = "opened" if opened else "never"
        adds = bool(body.add_special_tokens)
        tokens = self._served.encode(prompt, "messages", adds=adds, salt=salt)
        tokens = shortened(tokens, body, self._served)
        has_marks = think != "never" or (self._marks is not None and self._marks.answer_opens)
        is_parsed = tools.functions or has_marks or self._form is HARMONY
        writer = chat.ChatWriter(
            (lambda: self._thinking(parser(self._form, tools), think)) if is_parsed else Plain,
            text.token_bytes if body.num_logprobs >= 0 else None,
            reasons=body.include_reasoning,
            custom=tools.custom,
        )
        job = _Job(writer, "messages", ignored, *self._grammar(body, tools, think), salt=salt)
        if is_parsed:
            job.markers = self._kept
            job.over = partial(self._end_of_calls, tools, think)
        return self._prepared(body, [tokens], job)

    def completion(self, raw: bytes, own_salt: str = "") -> Prepared:
        """POST /v1/completions; raises as `chat` does."""
        body = parse(CompletionBody, raw)
        self._served.check_model(body.model)
        ignored = self._unheeded(body)
        limit = self._served.config.max_inflight
        if len(body.prompt) * body.num_samples > limit:
            raise invalid(f"prompt: at most {limit} choices", "prompt")
        text, salt = self._served.text, body.salt(own_salt)
        whole = completions.prompts(body, self._served, salt)
        prompts = [shortened(prompt, body, self._served) for prompt in whole]
        echoes = completions.echoes(body, prompts, text)
        scores = body.echo and body.logprobs is not None
        writer = completions.TextWriter(
            echoes,
            text.token_bytes if body.num_logprobs >= 0 else None,
            [prompt for prompt in prompts for _ in range(body.num_samples)] if scores else (),
            body.num_logprobs,
        )
        grammar = self._grammar(body, Tools([]), "never")
        return self._prepared(body, prompts, _Job(writer, "prompt", ignored, *grammar, salt=salt))

    def _unheeded(self, body: GenerationBody) -> tuple[str, ...]:
        """Fields that have no effect; raises an ApiError, 400, for them if they are refused."""
        return self._told(unheeded(body.unknown(self._served.text.template_source)))

    def _told(self, names: Iterable[str]) -> tuple[str, ...]:
        names = tuple(names)
        if names and self._served.config.unknown_fields == "refuse":
            raise unsupported(f"of no effect here, and refused: {listed(names)}", names[0])
        return names

    def _think(self, prompt: str) -> Think:
        """Whether an answer begins with reasoning; a template may have opened or closed it."""
        if self._marks is None:
            begins = self._form is HARMONY and prompt.endswith(harmony.BEGINS)
            return "maybe" if begins else "never"
        end = prompt.rstrip()
        if end.endswith(self._marks[1]):
            return "never"
        return "opened" if end.endswith(self._marks[0]) else "maybe"

    def _end_of_calls(self, tools: Tools, think: Think) -> Callable[[str], bool] | None:
        """A function that says when the only call allowed has ended; None if more are allowed."""
        calls = parser(self._form, tools)
        if not isinstance(calls, FirstCallOnly):
            return None
        answer = self._thinking(calls, think)

        def over(text: str) -> bool:
            answer.feed(text)
            return calls.over

        return over

    def _thinking(self, inner: Parser, think: Think) -> Parser:
        if self._marks is None:
            return inner
        if think == "never":
            return Answer(inner, self._marks) if self._marks.answer_opens else inner
        call = "" if self._form is None else self._form.ends_thought
        return Reasoning(inner, inside=think == "opened", marks=self._marks, call=call)

    @cached_property
    def _spelling(self) -> Spelling:
        """How texts stand in a grammar."""
        text = self._served.text
        added = {content: i for i, content in text.added.items() if i < text.vocab_size}
        special = {content: i for content, i in added.items() if i in text.special_ids}
        return Spelling(special, added)

    def _grammar(
        self, body: GenerationBody, tools: Tools, think: Think
    ) -> tuple[str, str, tuple[str, ...]]:
        """The grammar of the output, the field that asks for it, and what it does not keep to.

        Without any, both are empty, and no call is kept to its schema.
        """
        constraint = constraint_of(body, self._bounds)
        is_free = constraint is None and not tools.demanded
        holds_all = self._served.config.strict_tools
        if is_free and not any(function.strict or holds_all for function in tools.functions):
            return "", "", ()
        has_end = body.min_tokens or body.ignore_eos  # a grammar has one of its own
        can_be = can_be_free(self._form, begun=think == "never") and not has_end
        if is_free and not (can_be and self._validator.is_usable):
            return "", "", self._told(("tools.strict",))
        may_call = tools.demanded or (tools.functions and self._form is not None)
        param = "tools" if constraint is None or tools.demanded else constraint.param
        self._validator.require(param)
        made = CallRules()
        if is_free:
            made = self._free(tools, think)
        elif may_call:
            made = call_rules(self._form, tools, lambda: self._spelling, self._bounds)
        parts, rules = made.parts, made.rules
        alternatives = ["answer"] if is_free else ["calls"] if may_call else []
        of_tools = tuple[str, ...]()
        if constraint is not None and not tools.demanded:
            if may_call:  # checked alone first, so that an error names the right field
                calls = composed(parts, [*rules, "body: calls"])
                of_tools = self._validator.check(calls, "tools")
            part = dict(constraint.part)
            if constraint.param.endswith("grammar"):
                part["lark_grammar"] = self._spelling.by_id(part["lark_grammar"])
            parts = [*parts, ("form", part)]
            is_message = self._form is HARMONY and think != "never"
            alternatives = ["final @form" if is_message else "@form", *alternatives]
        body_rule = "body: " + " | ".join(alternatives)
        grammar = composed(parts, [*rules, body_rule], self._thought(think))
        own = [word for word in self._validator.check(grammar, param) if word not in of_tools]
        names = [*made.unkept, *(() if constraint is None or tools.demanded else constraint.told)]
        known = {name.rpartition(".")[2] for name in names}
        names += [f"tools.{name}" for name in unkept(of_tools) if name not in known]
        names += [f"{param}.{name}" for name in unkept(own) if name not in known]
        for name in names:
            if name.startswith("response_format.") and name.endswith(".uniqueItems"):
                raise invalid(f"{name}: not supported", param)
        return grammar, param, self._told(dict.fromkeys(names))

    def _free(self, tools: Tools, think: Think) -> CallRules:
        """The rules of `answer`, which may call."""
        kept = (self._served.text.token_of(mark) for mark in self._kept)
        opens = self._marks[0] if think == "maybe" and self._marks is not None else ""
        around = Around(frozenset(token for token in kept if token is not None), opens)
        return answer_rules(self._form, tools, self._spelling, self._bounds, around)

    def _thought(self, think: Think) -> str:
        """The rules of reasoning before an answer; empty: there is none."""
        if think == "never":
            return ""
        if self._marks is None:
            return harmony.message_rules(self._spelling)
        call = "" if self._form is None else regex(self._form.ends_thought)
        marks, opened = self._marks[:2], think == "opened"
        return think_rules(*marks, self._spelling, opened=opened, without=call)

    def _prepared(
        self, body: GenerationBody, prompts: Sequence[tuple[int, ...]], job: _Job
    ) -> Prepared:
        served, reqs = self._served, list[Req]()
        text = served.text
        _check_sums(body, prompts, job)
        skip = text.special_ids_but(job.markers) if body.skip_special_tokens else frozenset[int]()
        for prompt in prompts:
            max_tokens = allowed_tokens(len(prompt), body, served, job.param)
            sampling = body.sampling(max_tokens, text.vocab_size, served.defaults, job.grammar)
            if body.num_samples > body.n:  # the best are chosen by their logprobs
                sampling = replace(sampling, logprobs=max(0, sampling.logprobs))
            leader: Req | None = None
            for i in range(body.num_samples):
                keeps, is_wanted = body.include_stop_str_in_output, body.asked_max_tokens[0] != 0
                places = body.num_logprobs >= 0
                ends = Ends(body.stop, keeps, body.min_tokens, job.over(), is_wanted, places)
                output = text.output(prompt, ends, skip)
                own = replace(sampling, seed=seed_of(sampling.seed, i))
                if leader is not None and not body.stream:  # `Answer` has the leader's
                    own = replace(own, prompt_logprobs=-1)
                reqs.append(Req(len(reqs), prompt, own, output, leader, job.salt))
                leader = leader or reqs[-1]
                leader.leads |= leader is not reqs[-1]
        options = body.stream_options
        return Prepared(
            writer=job.writer,
            model=served.model,
            reqs=reqs,
            streamed=body.stream,
            num_samples=body.num_samples,
            num_kept=body.n,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            return_stages=body.return_stages,
            return_resumes=body.return_resumes,
            return_token_ids=body.return_token_ids,
            prompt_logprobs=None
            if body.prompt_logprobs is None
            else partial(of_prompt, bytes_of=text.token_bytes, num_top=body.prompt_logprobs),
            unheeded=(*job.unheeded, *job.unkept),
            priority=body.priority,
            is_seeded=body.seed is not None,
            named=body.named,
            grammar_param=job.grammar_param,
        )


def shortened(prompt: tuple[int, ...], body: GenerationBody, served: Served) -> tuple[int, ...]:
    """The last tokens of a prompt, as many as the body wants; -1: as leave room for the answer.

    Raises an ApiError, 400, if it wants more than there can be.
    """
    asked, name = body.truncate_prompt_tokens, "truncate_prompt_tokens"
    if asked is None:
        return prompt
    max_model_len = served.max_model_len
    if asked == 0 or asked > max_model_len:
        raise invalid(f"{name}: must be -1, or in [1, {max_model_len}]", name)
    fits = max(1, max_model_len - (body.asked_max_tokens[0] or 1))
    return prompt[-(fits if asked < 0 else asked) :]


def allowed_tokens(num_prompt_tokens: int, body: GenerationBody, served: Served, param: str) -> int:
    """How many tokens the output may have; `param` is the field that holds the prompt.

    Raises an ApiError, 400, if the prompt is empty or leaves less room than the body asks for.
    """
    limit = served.max_model_len
    if num_prompt_tokens == 0:
        raise invalid("the prompt is empty", param)
    left, (asked, field) = limit - num_prompt_tokens, body.asked_max_tokens
    if left > 0 and (body.fits_max_tokens or left >= (asked or 1)):
        if asked == 0:  # workers draw one at least
            return 1
        return min(left, asked or body.default_max_tokens or left)
    words = f"your prompt has {num_prompt_tokens} tokens"
    if asked is not None:
        words += f" and {field} is {asked}"
    fits = left > 0  # then a shorter output would fit
    raise TooLong(limit, words, str(num_prompt_tokens), field if fits else param)


def _check_sums(body: GenerationBody, prompts: Sequence[tuple[int, ...]], job: _Job) -> None:
    num_choices = len(prompts) * body.num_samples
    num_tokens = sum(map(len, prompts)) * body.num_samples
    sums = (
        (job.param, num_tokens),
        ("logit_bias", len(body.logit_bias) * num_choices),
        (job.grammar_param, len(job.grammar) * num_choices),
        ("prompt_logprobs", (1 + body.num_prompt_logprobs) * num_tokens),
    )
    for (what, limit), (param, num) in zip(MAX_SUMS.items(), sums, strict=True):
        if num > limit:
            raise invalid(f"{param}: all choices have {num} {what}, at most {limit} may be", param)


def _bounds(config: RouterConfig, context: int, validator: Validator) -> Bounds:
    chars, calls = config.max_string_chars, config.max_tool_calls
    if chars == "auto":
        chars = min(max(context // 4, AUTO_STRING_CHARS[0]), AUTO_STRING_CHARS[1])
    if calls == "auto":
        calls = min(max(context // 256, AUTO_CALLS[0]), AUTO_CALLS[1])
    return Bounds(chars, config.max_integer, calls, validator.tried)
