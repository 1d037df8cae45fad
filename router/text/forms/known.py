"""The forms of calls that families use, by the names that `router.tool_parser` takes.

What a template writes comes before what stands here (`recognise`): rows give names, and forms to
templates that write no calls.
"""

from collections.abc import Mapping

from router.text.forms.form import ID, Form, Json, Pairs, Tags

BAR = "\N{FULLWIDTH VERTICAL LINE}"
PYTHON = ("True", "False", "None")
_OPENS, _NAMED = '{"name": "', '", "arguments": '


def _list(
    name: str, first: str, last: str, enters: tuple[str, ...] = (), skips: tuple[str, ...] = ()
) -> Form:
    """Calls in a list of JSON."""
    return Form(
        name=name, first=first, opens=_OPENS, named=_NAMED, closes="}", between=", ", last=last,
        enters=enters, skips=skips,
    )  # fmt: skip


_FORMS = (
    # JSON in marks.
    Form(name="hermes", opens=f"<tool_call>\n{_OPENS}", named=_NAMED, closes="}\n</tool_call>"),
    # Calls as XML.
    Form(
        name="qwen3_coder", opens="<tool_call>\n<function=", named=">\n",
        style=Tags("<parameter=", ">\n", "\n</parameter>\n"),
        closes="</function>\n</tool_call>", words=PYTHON, enters=("<function=",),
    ),
    Form(
        name="seed_oss", opens="<seed:tool_call>\n<function=", named=">\n",
        style=Tags("<parameter=", ">", "</parameter>\n"), closes="</function>\n</seed:tool_call>",
        words=PYTHON,
    ),
    Form(
        name="glm45", opens="<tool_call>", named="\n",
        style=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), closes="</tool_call>",
    ),
    Form(
        name="minimax_m2", first="<minimax:tool_call>\n", opens='<invoke name="', named='">\n',
        style=Tags('<parameter name="', '">', "</parameter>\n"), closes="</invoke>\n", between="",
        last="</minimax:tool_call>",
    ),
    Form(
        name="deepseek_v32", first=f"<{BAR}DSML{BAR}function_calls>\n",
        opens=f'<{BAR}DSML{BAR}invoke name="', named='">\n',
        style=Tags(
            f'<{BAR}DSML{BAR}parameter name="', '" string="true">', f"</{BAR}DSML{BAR}parameter>\n",
            other='" string="false">',
        ),
        closes=f"</{BAR}DSML{BAR}invoke>\n", between="", last=f"</{BAR}DSML{BAR}function_calls>",
    ),
    Form(
        name="minicpm5", opens='<function name="', named='">',
        style=Tags('<param name="', '">', "</param>", cdata=True), closes="</function>",
        words=PYTHON,
    ),
    # A name between marks, then JSON.
    Form(name="functionary31", opens="<function=", named=">", closes="</function>", between=""),
    Form(name="functionary32", named="\n", between=">>>", bare=True, says="all\n"),
    Form(
        name="mistral11", opens="[TOOL_CALLS]", named="[ARGS]", between="",
        behind_name=("[CALL_ID]", ID),
    ),
    Form(name="mistral32", opens="[TOOL_CALLS]", named=f"[CALL_ID]{ID}[ARGS]", between=""),
    Form(
        name="deepseek_r1", first=f"<{BAR}tool▁calls▁begin{BAR}>",
        opens=f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>", named="\n```json\n",
        closes=f"\n```<{BAR}tool▁call▁end{BAR}>", last=f"<{BAR}tool▁calls▁end{BAR}>",
        enters=(f"<{BAR}tool▁call▁begin{BAR}>",),
    ),
    Form(
        name="deepseek_v31", first=f"<{BAR}tool▁calls▁begin{BAR}>",
        opens=f"<{BAR}tool▁call▁begin{BAR}>", named=f"<{BAR}tool▁sep{BAR}>",
        closes=f"<{BAR}tool▁call▁end{BAR}>", between="", last=f"<{BAR}tool▁calls▁end{BAR}>",
        enters=(f"<{BAR}tool▁call▁begin{BAR}>",),
    ),
    Form(
        name="kimi_k2", first="<|tool_calls_section_begin|>", opens="<|tool_call_begin|>functions.",
        named=f":{ID}<|tool_call_argument_begin|>", closes="<|tool_call_end|>", between="",
        last="<|tool_calls_section_end|>", enters=("<|tool_call_begin|>",),
    ),
    # JSON in a list.
    Form(
        name="mistral", first="[TOOL_CALLS][", opens=_OPENS, named=_NAMED,
        closes=f', "id": "{ID}"}}', between=", ", last="]",
    ),
    Form(
        name="cohere", first="<|START_ACTION|>[\n    ",
        opens=f'{{"tool_call_id": "{ID}", "tool_name": "', named='", "parameters": ', closes="}",
        between=",\n    ", last="\n]<|END_ACTION|>",
    ),
    Form(
        name="command_r", first="Action:\n```json\n[\n    ", opens='{\n        "tool_name": "',
        named='",\n        "parameters": ', closes="\n    }", between=",\n    ", last="\n]```",
        silent=("directly-answer", "directly_answer"),
    ),
    _list("granite", "<|tool_call|>[", "]", enters=("<tool_call>",), skips=("</tool_call>", "[")),
    _list("phi", "<|tool_call|>[", "]<|/tool_call|>", enters=("functools",)),
    _list("firefunction", " functools[", "]"),
    _list(
        "nemotron", "<TOOLCALL>[", "]</TOOLCALL>", enters=("<toolcall>",), skips=("</toolcall>",),
    ),
    Form(
        name="apertus", first="<|tools_prefix|>[", opens='{"', named='": ', closes="}",
        between=", ", last="]<|tools_suffix|>",
    ),
    # Names and values as programming languages write them.
    Form(
        name="olmo3", first="<function_calls>", named="(", style=Pairs("=", ")"),
        last="</function_calls>", skips=(",", ";", "[", "]"),
    ),
    Form(
        name="lfm2", first="<|tool_call_start|>[", named="(", style=Pairs("=", ")"), between=", ",
        last="]<|tool_call_end|>", words=PYTHON,
    ),
    Form(
        name="pythonic", first="[", named="(", style=Pairs("=", ")"), between=", ", last="]",
        words=PYTHON, bare=True, skips=("<|python_start|>", "<|python_end|>"),
    ),
    Form(
        name="gemma", first="```tool_code\n", named="(", style=Pairs("=", ")"), last="\n```",
        words=PYTHON, skips=("print(", ")"),
    ),
    Form(
        name="gemma4", opens="<|tool_call>call:", named="{", style=Pairs(":", "}", ",", '<|"|>'),
        closes="<tool_call|>", between="", words=("true", "false", "None"),
    ),
    Form(
        name="functiongemma", opens="<start_function_call>call:", named="{",
        style=Pairs(":", "}", ",", "<escape>"), closes="<end_function_call>", between="",
    ),
    # Without marks.
    Form(name="glm", named="\n", bare=True, single=True),
    Form(
        name="llama3", opens=_OPENS, named='", "parameters": ', closes="}", between="; ", bare=True,
        skips=("<|python_tag|>",),
    ),
)  # fmt: skip
# Harmony is no row: its messages are split by a parser of their own.
HARMONY = Form(name="harmony", style=Json())
# What tells a form where a template writes no calls, in what it says of tools or elsewhere; the
# first that is there counts.
SIGNS = (
    ("<|channel|>", "harmony"), ("[CALL_ID]", "mistral32"), ("[ARGS]", "mistral11"),
    ("[TOOL_CALLS]", "mistral"), ("<|start_of_role|>", "granite"),
    ("<|tool_calls_section_begin|>", "kimi_k2"), (f"<{BAR}DSML{BAR}", "deepseek_v32"),
    (f"<{BAR}tool▁sep{BAR}>", "deepseek_r1"), ("<|START_ACTION|>", "cohere"),
    ("Action:\n```json", "command_r"), ("<|tools_prefix|>", "apertus"),
    ("<start_function_call>", "functiongemma"), ("<|tool_call>", "gemma4"),
    ("<|tool_call_start|>", "lfm2"), ("<|tool_list_start|>", "lfm2"),
    ("<seed:tool_call>", "seed_oss"), ("<minimax:tool_call>", "minimax_m2"),
    ("<function_calls>", "olmo3"), ("<TOOLCALL>", "nemotron"), ("<toolcall>", "nemotron"),
    ("<arg_key>", "glm45"), ("<parameter=", "qwen3_coder"), ("<param name=", "minicpm5"),
    ("<tool_call>", "hermes"), ("<function=", "functionary31"),
    (">>>${recipient}", "functionary32"), ("functools[", "firefunction"), ("<|tool|>", "phi"),
    ("<start_of_turn>", "gemma"), ("[gMASK]", "glm"), ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"), ("ipython", "llama3"),
)  # fmt: skip
FORMS: Mapping[str, Form] = {form.name: form for form in (*_FORMS, HARMONY)}
