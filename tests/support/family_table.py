"""What holds of each family that is served: prompts, calls, reasoning, ends, drafts, formats.

    python -m tests.support.family_table [--templates DIRECTORY] > tests/support/families.txt

downloads published chat templates (`published_templates`), unless the directory has them, and tries
all of them. A family of which none is there is tried with one of ours (`call_forms`).
"""

import json
import re
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from router.config import RouterConfig
from router.text.forms.form import Form
from router.text.forms.known import HARMONY
from router.text.forms.parser import FormParser
from router.text.forms.schema import kind_of
from router.text.harmony import Harmony
from router.text.parsers import Plain
from router.text.probe import NAMES as PROBED
from router.text.probe import Probe
from router.text.reasoning import Marks, Reasoning
from router.text.speech import speech_of
from router.text.tokenizer import Text
from tests.support.call_checks import calls_of, forced, grammar_of, marks_of, taken, tokenizer
from tests.support.call_forms import CASES, FORCED, NAMES
from tests.support.published import published
from tests.support.published_templates import SPECIAL, compared, directory_of, fetched
from worker.config.checkpoint.families import FAMILIES
from worker.config.checkpoint.shape import read_model_shape
from worker.config.checkpoint.tokens import eos_ids, read_tokens
from worker.drafts.draft_forms import FORMS
from worker.errors import UserError

REPOSITORY = Path(__file__).parents[2]
TABLE, MODELS = Path(__file__).with_name("families.txt"), REPOSITORY / "benchmarks/models"
# Architectures of which no configuration is here -> one with the same fields.
LIKE = {"GlmForCausalLM": "Glm4ForCausalLM", "MinistralForCausalLM": "MistralForCausalLM"}
OWN = "own: "  # a case of `call_forms`
MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QWEN_3, NEMO = "Qwen-Qwen3-0.6B", "mistralai-Mistral-Nemo-Instruct-2407"
LLAMA = (
    "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "meetkai-functionary-medium-v3.1",
    "meetkai-functionary-medium-v3.2", "fireworks-ai-llama-3-firefunction-v2",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
)  # fmt: skip
TEMPLATES: Mapping[str, Sequence[str]] = {
    "Command-R": ("CohereForAI-c4ai-command-r-plus-tool_use",),
    "Command-R7B and A": ("CohereForAI-c4ai-command-r7b-12-2024-tool_use",),
    "DeepSeek-V2": (f"{OWN}deepseek_r1",),  # V2.5's calls are so
    "DeepSeek-V3, R1 and Kimi-K2": (f"{OWN}deepseek_v31", f"{OWN}deepseek_r1", f"{OWN}kimi_k2"),
    "EXAONE 4": (f"{OWN}hermes",),
    "Gemma 2": ("google-gemma-2-2b-it",),
    "Gemma 3 (text)": ("gemma3",),
    "GLM-4-0414": (f"{OWN}glm",),
    "GLM-4-chat-hf": (f"{OWN}glm",),
    "GLM-4.7-Flash": (f"{OWN}glm45",),
    "gpt-oss": ("openai-gpt-oss-120b",),
    "Granite 3": ("ibm-granite-granite-3.3-2B-Instruct", f"{OWN}granite"),
    "Llama 2 and 3": LLAMA,
    "MiMo-7B": ("MiMo-VL",),
    "Ministral": (NEMO,),
    "Mistral": (
        NEMO, "Mistral-Small-3.2-24B-Instruct-2506",
        "unsloth-mistral-Devstral-Small-2507",
    ),
    "Mixtral": (f"{OWN}mistral",),
    "Nemotron (dense)": (f"{OWN}nemotron",),
    "OLMo 2": (f"{OWN}hermes",),
    "OLMo 3": (f"{OWN}olmo3",),
    "Phi-3 and Phi-4": ("microsoft-Phi-3.5-mini-instruct", f"{OWN}phi"),
    "Qwen2.5": (
        "Qwen-Qwen2.5-7B-Instruct", "Qwen-QwQ-32B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    ),
    "Qwen3": (QWEN_3,),
    "Qwen3 MoE": (QWEN_3, "Qwen3-Coder"),
    "Qwen3-Next": (QWEN_3, "Qwen3-Coder"),
    "Qwen3.5 (dense, text)": ("Qwen3.5-4B",),
    "Qwen3.5 MoE (text)": ("Qwen3.5-4B",),
    "Seed-OSS": ("ByteDance-Seed-OSS",),
    "SmolLM3": ("HuggingFaceTB-SmolLM3-3B",),
}  # fmt: skip
COLUMNS = (
    "family", "template", "prompts", "calls", "read", "forced", "reasoning", "a turn's end",
    "mtp", "FP8", "windows",
)  # fmt: skip
HEAD = """What holds of each family, by its chat templates as published, or by one of ours in the family's way
("own"). `python -m tests.support.family_table` tries it all and writes this; "-": the template has no
such thing.

prompts       of 14 conversations equal to transformers; more: where that refuses, prints a list, loses a call
              or adds an empty turn
calls         their form, by what the template writes for calls (probe), or a guess where it writes none
read          two calls with nested objects, lists, numbers, booleans, null, lines and other scripts come back,
              whole and in pieces of 1 to 7 characters
forced        so does what the form's grammar makes at random
reasoning     its mark: it is told apart, whole and in pieces
a turn's end  a tokenizer that names it as eos_token, and no other file, ends answers there
mtp, FP8      the checkpoint's own layer drafts; matrices in blocks are read as published
"""  # noqa: E501 - a page


class Row(NamedTuple):
    """What was seen with one template."""

    prompts: str
    calls: str
    read: str
    forced: str
    reasoning: str
    end: str


def row(path: Path) -> Row:
    """Try the template in a directory."""
    text = Text(path)
    said = speech_of(text, RouterConfig())
    form = None if said.form_by == "none" else said.form
    return Row(
        _prompts(path),
        "-" if form is None else f"{form.name}, {said.form_by}",
        "-" if form is None or said.form_by != "probe" else _mark(_is_read(form, text.probe)),
        "-" if form is None or form is HARMONY else _mark(_is_forced(form)),
        "-" if said.marks is None else f"{said.marks.opens} {_mark(_reasons(said.marks))}",
        _end(text, path),
    )


def _mark(holds: bool) -> str:
    return "✓" if holds else "✗"


def _prompts(path: Path) -> str:
    found = [conversation.verdict for conversation in compared(path)]
    counts = {verdict: found.count(verdict) for verdict in ("equal", "more", "differs")}
    told = [str(counts["equal"])]
    told += [f"{counts['more']} more"] if counts["more"] else []
    told += [f"{counts['differs']} ✗"] if counts["differs"] else []
    return ", ".join(told)


def _is_read(form: Form, probe: Probe) -> bool:
    called = list(zip(PROBED, probe.arguments, strict=False))
    schemas = {
        name: {"properties": {key: {"type": kind_of(value)} for key, value in given.items()}}
        for name, given in called
    }
    seeds = (None, *range(6))
    found = [
        taken(Harmony() if form is HARMONY else FormParser(form, schemas), probe.text, seed)
        for seed in seeds
    ]
    return all(calls_of(parsed) == called for parsed in found)


def _is_forced(form: Form) -> bool:
    for special in (False, True):
        made, spelling = tokenizer(marks_of(form), special=special)
        grammar = grammar_of(form, FORCED, spelling)
        for seed in range(2):
            parser = FormParser(form, dict.fromkeys(NAMES, FORCED))
            parsed = taken(parser, forced(made, grammar, seed), seed)
            if parsed.content.strip() or not parsed.calls:
                return False
    return True


def _reasons(marks: Marks) -> bool:
    said = f"{marks.opens}\nI think\n so.\n{marks.closes}\n\n"
    said += f"{marks.answer_opens}Yes.{marks.answer_closes}"
    for seed in (None, 0, 1, 2):
        parsed = taken(Reasoning(Plain(), inside=False, marks=marks), said, seed)
        if (parsed.reasoning, parsed.content) != ("I think\n so.", "Yes."):
            return False
    return True


def _end(text: Text, path: Path) -> str:
    chat = [
        {"role": "user", "content": "kvlaneasks"},
        {"role": "assistant", "content": "kvlanesays"},
    ]
    try:
        behind = text.render(chat, add_generation_prompt=False).rpartition("kvlanesays")[2]
    except UserError:
        return "-"
    if (found := MARK.match(behind.strip())) is None:
        return "-"
    mark, named = found[0], path / "tokenizer_config.json"
    held = named.read_text()
    if json.loads(held) == SPECIAL:  # of ours, which lacks the token
        added = {str(text.vocab_size): {"content": mark, "special": True}}
        named.write_text(json.dumps(SPECIAL | {"eos_token": mark, "added_tokens_decoder": added}))
    ends = eos_ids(path, 1 << 20) == (read_tokens(path).file.id_of(mark),)
    named.write_text(held)
    return f"{mark} {_mark(ends)}"


def formats(models: str) -> tuple[str, str, str]:
    """Whether `mtp` and FP8 are read of a family, and which of its layers have windows."""
    names = [name for name, family in FAMILIES.items() if family.models == models]
    drafts = any(FORMS["architectures"].get(name) for name in names)
    windows = FAMILIES[names[0]].windows
    told = {"": "-", "flag": "use_sliding_window", "all": "sliding_window"}
    shown = told[windows] if isinstance(windows, str) else f"all but 1 in {windows}"
    return "✓" if drafts else "-", _mark(_takes_fp8(names)), shown


def _takes_fp8(names: Sequence[str]) -> bool:
    known = [config for config, _ in published().values()]
    known += [json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))]
    like = {*names, *(LIKE[name] for name in names if name in LIKE)}
    fit = (x for x in known if x["architectures"][0] in like)
    config = min(fit, key=lambda x: "quantization_config" in x) | {"quantization_config": FP8}
    if config["architectures"][0] not in names:
        config["architectures"] = names[:1]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config))
        return read_model_shape(Path(place)).quantization is not None


def own(place: Path) -> Mapping[str, Path]:
    """Directories of our templates, made in `place`."""
    first = {case.name: case for case in reversed(CASES)}
    return {OWN + name: directory_of(first[name].template(), place / name) for name in first}


def cells(name: str, directory: Path) -> Sequence[str]:
    """What the table says of a template."""
    return (name, *row(directory))


def table(directories: Mapping[str, Path]) -> Iterator[str]:
    """Its lines, below the head."""
    tried = {name: cells(name, directories[name]) for names in TEMPLATES.values() for name in names}
    rows = [COLUMNS]
    for models, (first, *others) in TEMPLATES.items():
        rows.append((models, *tried[first], *formats(models)))
        rows += [("", *tried[name]) for name in others]
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    for shown in rows:
        padded = [text.ljust(width) for text, width in zip(shown, widths, strict=False)]
        yield " | ".join(padded).rstrip()


def main() -> None:
    options = ArgumentParser(description=__doc__)
    options.add_argument("--templates", type=Path, help="where they are, or are to be kept")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        directories = {**fetched(asked.templates or place / "fetched"), **own(place)}
        print(HEAD)
        print(*table(directories), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
