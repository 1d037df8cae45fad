"""What a GGUF file says of its vocabulary, as tokenizer.json and tokenizer_config.json.

Texts become the tokens that llama.cpp makes of them (its src/llama-vocab.cpp): files are made for
it, and it says what a name in `tokenizer.ggml.pre` means. NFC, which it leaves out, is done where
the published tokenizer of such a name does it.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from worker.config.gguf.file import Header
from worker.errors import Unsupported, UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token_type
SPACE = "\u2581"  # as sentencepiece writes it

# How texts are cut before merges, by whose tokenizer.json says so.
_SUFFIXES, _LETTER = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = _SUFFIXES + "|" + _LETTER + r"\p{L}+|\p{N}{1,3}" + _REST
QWEN_2 = _SUFFIXES + "|" + _LETTER + r"\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = f"{_LETTER}{_UPPER}*{_LOWER}+", f"{_LETTER}{_UPPER}+{_LOWER}*"
_REST_OF_WORDS = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
TEKKEN = "|".join(_WORDS) + r"|\p{N}" + _REST_OF_WORDS
GPT_4O = "|".join(f"{word}{_SUFFIXES}?" for word in _WORDS) + r"|\p{N}{1,3}" + _REST_OF_WORDS


class Cut(NamedTuple):
    """What a name in tokenizer.ggml.pre means."""

    pattern: str = ""  # "": GPT-2's, which the library has
    single_digits: bool = False
    ignore_merges: bool = False  # of words that are in the vocabulary
    adds_bos: bool = False  # where the file does not say
    nfc: bool = False


CUTS: Mapping[str, Cut] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum"), Cut()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        Cut(single_digits=True),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        Cut(LLAMA_3, ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Cut(LLAMA_3)),
    "qwen2": Cut(QWEN_2, nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), Cut(QWEN_2)),
    "tekken": Cut(TEKKEN, ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), Cut(GPT_4O)),
}
# Control tokens that end an answer, by their text: files name one of several (llama.cpp#9606).
ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("</s>", "<eos>", "<|eom_id|>", "<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
}


class Vocabulary:
    """The tokens of a file.

    Raises Unsupported for a kind that is not read, UserError for one that is wrong; both name the
    key.
    """

    def __init__(self, header: Header) -> None:
        self._header, self._metadata = header, header.metadata
        self._tokens: list[str] = self._get("ggml.tokens") or []
        if len(set(self._tokens)) != len(self._tokens) or not self._tokens:
            raise UserError(f"{header.path}: tokenizer.ggml.tokens: none, or some of them twice")
        if len(self._tokens) > (rows := header.tensors["token_embd.weight"].shape[0]):
            problem = f"{len(self._tokens)} tokens, and {rows} rows of token_embd.weight"
            raise UserError(f"{header.path}: tokenizer.ggml.tokens: {problem}")
        self._types = self._listed("token_type", NORMAL)
        self.kind = self._get("ggml.model")
        if self.kind not in ("gpt2", "llama"):
            raise self._unsupported("ggml.model", "read are gpt2 and llama")
        pre = self._get("ggml.pre")
        if self.kind == "gpt2" and pre not in CUTS:
            raise self._unsupported("ggml.pre", f"read are {', '.join(CUTS)}")
        self._cut = CUTS[pre] if self.kind == "gpt2" else Cut(adds_bos=True)

    def ends(self) -> list[int]:
        """Tokens that end an answer, eos first."""
        named = [self._id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        found = [i for i in named if i is not None]
        found += [i for i in self._of_types(CONTROL) if self._tokens[i] in ENDS]
        return list(dict.fromkeys(found))

    def described(self) -> dict[str, Any]:
        """What tokenizer_config.json says."""
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {f"{name}_token": self._id(f"{key}_token_id") for name, key in names.items()}
        special = {name: self._tokens[i] for name, i in ids.items() if i is not None}
        template = self._get("chat_template")
        named = "tokenizer.chat_template."
        others = [
            {"name": key.removeprefix(named), "template": text}
            for key, text in self._metadata.items()
            if key.startswith(named)
        ]
        if others:
            template = [*others, *[{"name": "default", "template": template}] * bool(template)]
        found = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        return found | special | {"clean_up_tokenization_spaces": False}

    def tokenizer(self) -> Tokenizer:
        """It encodes and decodes."""
        try:
            made = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        except Exception as error:  # the library raises nothing narrower
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self._header.path}: tokenizer.ggml: {error}") from error
        ends = {*self.ends()}
        special = [self._tokens[i] for i in self._of_types(CONTROL, UNKNOWN) if i not in ends]
        special += [self._tokens[i] for i in sorted(ends)]
        others = [self._tokens[i] for i in self._of_types(USER_DEFINED) if i not in ends]
        library: Any = made
        library.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in special])
        library.add_tokens([AddedToken(x, normalized=False) for x in others if not self._is_run(x)])
        bos, eos = self._added("bos", self._cut.adds_bos), self._added("eos", False)
        if bos or eos:
            ids = {token: self._tokens.index(token) for token in (*bos, *eos)}
            made.post_processor = TemplateProcessing(
                [*bos, "$A", *eos], special_tokens=[*ids.items()]
            )
        return made

    def _byte_level(self) -> Tokenizer:
        cut, merges = self._cut, self._get("ggml.merges")
        if not merges:
            raise self._unsupported("ggml.merges", "a byte-level vocabulary needs some")
        vocab = {token: i for i, token in enumerate(self._tokens)}
        pairs = [tuple(pair.split(" ")) for pair in merges]
        made = Tokenizer(BPE(vocab, pairs, ignore_merges=cut.ignore_merges))
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] * cut.single_digits
        if cut.pattern:
            steps.append(pre_tokenizers.Split(Regex(cut.pattern), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(False, use_regex=not cut.pattern))
        made.normalizer = normalizers.NFC() if cut.nfc else None
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
        made.decoder = decoders.ByteLevel()
        return made

    def _sentencepiece(self) -> Tokenizer:
        vocab = {
            SPACE * len(token) if self._is_run(token) else token: i
            for i, token in enumerate(self._tokens)
        }
        unknown = next((self._tokens[i] for i in self._of_types(UNKNOWN)), None)
        merges = [pair for _, pair in sorted(self._merges(vocab), key=itemgetter(0))]
        made = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        prefix = bool(self._get("ggml.add_space_prefix", True))
        # Before any text between special tokens, also before one that begins with a space.
        first = [normalizers.Prepend(SPACE)] * prefix
        made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * prefix])
        return made

    def _merges(self, vocab: Mapping[str, int]) -> Iterator[tuple[float, tuple[str, str]]]:
        """(rank, pair): of two adjacent tokens those that make the best token are merged first."""
        scores = self._listed("scores", 0.0)
        by_order = self._metadata["general.architecture"] == "gemma3"
        mergeable = {
            token: i
            for token, i in vocab.items()
            if self._types[i] == NORMAL or self._is_run(self._tokens[i])
        }
        for token, i in mergeable.items():
            # Gemma's runs of spaces have a score that says nothing; its tokens lie in their order.
            rank = float(i) if by_order else -scores[i]
            for at in range(len(token) - 1, 0, -1):
                if token[:at] in mergeable and token[at:] in mergeable:
                    yield rank, (token[:at], token[at:])

    def _is_run(self, token: str) -> bool:
        """Of spaces, that are merged rather than found."""
        return self.kind == "llama" and len(token) > 1 and not token.strip(" ")

    def _of_types(self, *kinds: int) -> list[int]:
        return [i for i, kind in enumerate(self._types) if kind in kinds]

    def _added(self, name: str, default: bool) -> list[str]:
        """The token that encoding adds, if any."""
        said, token = self._get(f"ggml.add_{name}_token"), self._id(f"{name}_token_id")
        if said and token is None:
            raise UserError(f"{self._header.path}: tokenizer.ggml.{name}_token_id: missing")
        adds = default if said is None else said
        return [self._tokens[token]] if adds and token is not None else []

    def _id(self, name: str) -> int | None:
        value = self._get(f"ggml.{name}")
        if value is not None and not 0 <= value < len(self._tokens):
            problem = f"{value}, of {len(self._tokens)} tokens"
            raise UserError(f"{self._header.path}: tokenizer.ggml.{name}: {problem}")
        return value

    def _listed(self, name: str, default: Any) -> Sequence[Any]:
        """A list of a value for every token."""
        found = self._get(f"ggml.{name}", [default] * len(self._tokens))
        if len(found) != len(self._tokens):
            problem = f"{len(found)} of {len(self._tokens)} tokens"
            raise UserError(f"{self._header.path}: tokenizer.ggml.{name}: {problem}")
        return found

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.{key}", default)

    def _unsupported(self, key: str, read: str) -> Unsupported:
        value = self._get(key)
        found = "absent" if value is None else repr(value)
        text = f"tokenizer.{key}: {found}; {read}: take a newer file, or its safetensors"
        return Unsupported(f"{self._header.path}: {text}")
