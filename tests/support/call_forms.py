"""Forms of calls: short templates of our own, in the way of families', that write two calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.template import ChatTemplate

BAR = "\N{FULLWIDTH VERTICAL LINE}"
LINES = 'one\n <two> "three"\n'
ARGUMENTS: Sequence[dict[str, Any]] = (
    {
        "nested": {"list": ["é", 1, 2.5, True, None], "deep": {"er": "x, y"}},
        "count": -3,
        "ratio": 1.5,
        "exact": False,
        "before": None,
        "tags": ["a", {"c": 1}],
        "lines": LINES,
        "place": "東京 & Zürich",
    },
    {"nested": {}, "lines": "Oslo"},
)
NAMES = ("look_up", "note")
CALLED: list[tuple[str, Any]] = list(zip(NAMES, ARGUMENTS, strict=True))
FREE: dict[str, Any] = {"type": "object", "additionalProperties": True}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "nested": {"$ref": "#/$defs/Nested"},
        "count": {"type": "integer"},
        "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "before": {"type": ["string", "null"]},
        "tags": {"type": "array"},
        "lines": {"type": "string"},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["nested", "lines"],
    "$defs": {"Nested": FREE, "Place": {"type": "string"}},
}
FUNCTIONS: Mapping[str, Any] = dict.fromkeys(NAMES, PARAMETERS)
# Small, so that a call at random is short.
FORCED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "lines": {"type": "string", "maxLength": 12},
        "size": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"enum": ["mm", "<inch>"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["lines", "unit"],
}
HEAD = (
    "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}"
)
TAIL = "[end]\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
JSON = "{{ c.function.arguments | tojson }}"
OBJECT = '{"name": "{{ c.function.name }}", "arguments": ' + JSON + "}"
# A value between marks: JSON's but for texts, or as Python prints it, all of it or scalars.
VALUE = "{{ v if v is string else v | tojson }}"
PRINTED = "{{ v }}"
MIXED = "{{ v | tojson if v is mapping or v is sequence and v is not string else v }}"
COMPACT = "tojson(separators=(',', ':'))"
BRACES = (
    "{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v | dictsort %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}"
    "{{ '}' }}{% elif v is sequence %}["
    "{% for w in v %}{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% elif v is none %}null{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
LITERALS = (  # as Python and JSON mixed
    "{% macro value(v) %}{{ v | tojson if v is string or v is mapping OR else v }}{% endmacro %}"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A form's template. each: of one call, `c`; round all: `first`, `between`, `last`."""

    name: str  # of the form that is to be found
    each: str
    first: str = ""
    between: str = "\n"
    last: str = ""
    macros: str = ""
    by: str = "probe"
    num_calls: int = 2

    def template(self, *, compact: bool = False) -> str:
        """Its source; compact: JSON without white space, as grammars have it."""
        num, each = f"[: {self.num_calls}]", self.each
        if compact:  # and no list as Python prints it
            each = each.replace(PRINTED, MIXED)
        calls = f"{{% if m.tool_calls %}}{self.first}{{% for c in m.tool_calls{num} %}}{each}"
        calls += (
            f"{{{{ {self.between!r} if not loop.last }}}}{{% endfor %}}{self.last}{{% endif %}}"
        )
        macros = self.macros.replace("OR", "or v is sequence" * compact)
        source = macros + HEAD + calls + TAIL
        return source.replace("tojson", COMPACT) if compact else source

    @property
    def called(self) -> list[tuple[str, Any]]:
        return CALLED[: self.num_calls]


def tags(opens: str, named: str, closes: str, value: str = VALUE) -> str:
    """Arguments between marks."""
    loop = "{% for k, v in c.function.arguments.items() %}"
    return f"{loop}{opens}{{{{ k }}}}{named}{value}{closes}{{% endfor %}}"


def pairs(equals: str, between: str = ", ", order: str = "items()") -> str:
    """Names and values."""
    loop = f"{{% for k, v in c.function.arguments{'.' + order if '(' in order else order} %}}"
    more = f"{{{{ {between!r} if not loop.last }}}}"
    return f"{loop}{{{{ k }}}}{equals}{{{{ value(v) }}}}{more}{{% endfor %}}"


NAME = "{{ c.function.name }}"
XML = f"<tool_call>\n<function={NAME}>\n"
DSML = f"{BAR}DSML{BAR}"
TEXT_OR_NOT = "{{ 'true' if v is string else 'false' }}\">" + VALUE
IN_BRACES = "{{ '{' }}" + pairs(":", ",", " | dictsort") + "{{ '}' }}"
CASES = (
    Case("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>"),
    Case("hermes", f"<tool_call>{OBJECT}</tool_call>", between=""),
    Case(
        "qwen3_coder",
        XML + tags("<parameter=", ">\n", "\n</parameter>\n", MIXED) + "</function>\n</tool_call>",
    ),
    Case(
        "seed_oss",
        f"<seed:tool_call>\n<function={NAME}>\n"
        + tags("<parameter=", ">", "</parameter>\n", PRINTED)
        + "</function>\n</seed:tool_call>",
    ),
    Case(
        "glm45",
        f"<tool_call>{NAME}\n"
        + tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>",
    ),
    Case(
        "glm45",
        f"<tool_call>{NAME}"
        + tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
        + "</tool_call>",
        between="",
    ),
    Case(
        "minimax_m2",
        f'<invoke name="{NAME}">\n'
        + tags('<parameter name="', '">', "</parameter>\n")
        + "</invoke>",
        first="<minimax:tool_call>\n",
        last="\n</minimax:tool_call>",
    ),
    Case(
        "deepseek_v32",
        f'<{DSML}invoke name="{NAME}">\n'
        + tags(f'<{DSML}parameter name="', '" string="', f"</{DSML}parameter>\n", TEXT_OR_NOT)
        + f"</{DSML}invoke>",
        first=f"<{DSML}function_calls>\n",
        last=f"\n</{DSML}function_calls>",
    ),
    Case(
        "minicpm5",
        f'<function name="{NAME}">'
        + tags(
            '<param name="', '">', "</param>",
            "{% if v is string and ('<' in v or '&' in v) %}<![CDATA[{{ v }}]]>"
            "{% else %}{{ v }}{% endif %}",
        )
        + "</function>",
    ),
    Case("functionary31", f"<function={NAME}>{JSON}</function>", between=""),
    Case("functionary32", f"{NAME}\n{JSON}", between=">>>"),
    Case("functionary32", f">>>{NAME}\n{JSON}", between=""),
    Case("mistral11", f"[TOOL_CALLS]{NAME}[ARGS]{JSON}", between=""),
    Case("mistral32", f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{JSON}", between=""),
    Case(
        "deepseek_r1",
        f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>{NAME}\n```json\n{JSON}\n"
        f"```<{BAR}tool▁call▁end{BAR}>",
        first=f"<{BAR}tool▁calls▁begin{BAR}>",
        last=f"<{BAR}tool▁calls▁end{BAR}>",
    ),
    Case(
        "deepseek_v31",
        f"<{BAR}tool▁call▁begin{BAR}>{NAME}<{BAR}tool▁sep{BAR}>{JSON}<{BAR}tool▁call▁end{BAR}>",
        first=f"<{BAR}tool▁calls▁begin{BAR}>",
        between="",
        last=f"<{BAR}tool▁calls▁end{BAR}>",
    ),
    Case(
        "kimi_k2",
        f"<|tool_call_begin|>functions.{NAME}:{{{{ loop.index0 }}}}<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|>",
        first="<|tool_calls_section_begin|>",
        between="",
        last="<|tool_calls_section_end|>",
    ),
    Case(
        "mistral",
        f'{{"name": "{NAME}", "arguments": {JSON}, "id": "{{{{ c.id }}}}"}}',
        first="[TOOL_CALLS][",
        between=", ",
        last="]",
    ),
    Case(
        "cohere",
        f'    {{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{NAME}", '
        f'"parameters": {JSON}}}',
        first="<|START_ACTION|>[\n",
        between=",\n",
        last="\n]<|END_ACTION|>",
    ),
    Case(
        "command_r",
        f'    {{\n        "tool_name": "{NAME}",\n        "parameters": {JSON}\n    }}',
        first="Action:\n```json\n[\n",
        between=",\n",
        last="\n]```",
    ),
    Case("granite", OBJECT, first="<|tool_call|>[", between=", ", last="]"),
    Case("phi", OBJECT, first="<|tool_call|>[", between=", ", last="]<|/tool_call|>"),
    Case("firefunction", OBJECT, first=" functools[", between=", ", last="]"),
    Case("nemotron", OBJECT, first="<TOOLCALL>[", between=", ", last="]</TOOLCALL>"),
    Case("own", OBJECT, first="<tool_calls>[", between=", ", last="]</tool_calls>"),
    Case("own", OBJECT, first="<tool_calls>\n", last="\n</tool_calls>"),
    Case("apertus", f'{{"{NAME}": {JSON}}}', first="<|tools_prefix|>[", between=", ",
         last="]<|tools_suffix|>"),
    Case("olmo3", f"{NAME}({pairs('=')})", "<function_calls>", last="</function_calls>",
         macros=BRACES.partition("{% if")[0] + "{{ v | tojson }}{% endmacro %}"),
    Case("lfm2", f"{NAME}({pairs('=')})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>",
         LITERALS),
    Case("pythonic", f"{NAME}({pairs('=')})", "[", ", ", "]", LITERALS),
    Case("gemma", f"{NAME}({pairs('=')})", "```tool_code\n", last="\n```", macros=LITERALS),
    Case("gemma4", f"<|tool_call>call:{NAME}{IN_BRACES}<tool_call|>", between="",
         macros=BRACES.replace("QUOTE", '<|"|>')),
    Case("functiongemma", f"<start_function_call>call:{NAME}{IN_BRACES}<end_function_call>",
         between="", macros=BRACES.replace("QUOTE", "<escape>")),
    Case("glm", f"{NAME}\n{JSON}", num_calls=1),
    Case("llama3", f'{{"name": "{NAME}", "parameters": {JSON}}}', between="; "),
    Case("llama3", f'{{"name": "{NAME}", "parameters": {JSON}}}', num_calls=1),
)  # fmt: skip


def rendered(
    case: Case, *, compact: bool = False, called: Sequence[tuple[str, Any]] = CALLED
) -> str:
    """What the template writes for the calls: the assistant's turn without its ends."""
    template = ChatTemplate(case.template(compact=compact), {})
    calls = [
        {"id": f"abcdefgh{i}", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(called)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    shown = template.render([{"role": "user", "content": "?"}, turn], add_generation_prompt=False)
    return shown.rpartition("[assistant]")[2].removesuffix("[end]\n")
