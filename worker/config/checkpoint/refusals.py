"""What is not served, and what could be taken instead. Free of torch."""

import re
from pathlib import Path

from worker.config.checkpoint.fields import Fields
from worker.errors import Unsupported

# Models that are served.
QWEN, HYBRID, LLAMA = "Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B", "meta-llama/Llama-3.1-8B-Instruct"
SPARSE, LATENT = "Qwen/Qwen3-30B-A3B", "zai-org/GLM-4.7-Flash"
MISTRAL, OLMO, PHI, GEMMA = (
    *("mistralai/Mistral-Nemo-Instruct-2407", "allenai/OLMo-2-1124-7B-Instruct"),
    *("microsoft/phi-4", "google/gemma-3-1b-it"),
)
READ = (
    "kvlane reads bf16, f16, f32 and FP8 safetensors, four bits of AWQ, GPTQ, compressed-tensors, "
    "NVFP4 and gpt-oss, and some GGUF files"
)
DENSE = f"take a dense model, as {QWEN} or {LLAMA}"

# Of `architectures`: pattern -> (what such models need, what to do instead). The first counts.
NEEDED: dict[str, tuple[str, str]] = {
    "Mamba|Jamba|Zamba|Bamba|Rwkv|FalconH1|NemotronH|MoeHybrid|RecurrentGemma|Lfm2|xLSTM|Linear": (
        "recurrent layers that are no gated delta nets",
        f"take {HYBRID}, which has those, or {QWEN}",
    ),
    "DeepseekV32|DeepseekV4|GlmMoeDsa|GlmDsa": (
        "sparse attention, over keys that an indexer chooses",
        f"take {LATENT}, or deepseek-ai/DeepSeek-V3.1",
    ),
    "Deepseek|Kimi|Longcat|MiniCPM3|Mistral4|MistralLarge4": (
        "another form of latent attention (MLA) or of experts than DeepSeek-V2 and V3 have",
        f"take {LATENT}, which has their form, or {DENSE[5:]}",
    ),
    "Moe|MoE|moe|Mixtral|Dbrx|Arctic|MiniMax|Llama4|Grok": (
        "experts of another form than Mixtral's or Qwen3's", f"take {SPARSE}, or {DENSE[5:]}",
    ),
    "ConditionalGeneration|VL|Vision|ImageText|Llava|Phi4MM|Phi3V|Omni|Audio|Whisper": (
        "images, sound or an encoder beside the text",
        f"take a model of text alone, as {QWEN}, or {HYBRID}, of which the text is served",
    ),
    "Gemma": (
        "what Gemma 2 and 3 have not", f"take one of those, as {GEMMA}, or a dense {MISTRAL}"
    ),
    "Step3|Afmoe": (
        "gates of its own beside sliding windows", f"take a model without, as {OLMO}",
    ),
    "Starcoder|GPT|Falcon|Bloom|MPT|Mpt|OPT|StableLm|Persimmon|^PhiFor|^OlmoFor": (
        "LayerNorm, or a feed-forward without a gate",
        f"take a model with RMSNorm and SwiGLU, as {PHI} or {QWEN}",
    ),
    "Baichuan|ChatGLM|QWenLM|InternLM|Orion|Yuan": (
        "code of its own",
        f"take its conversion to Llama, if there is one, or {QWEN}",
    ),
    "Bert|Roberta|T5|Classification|Embedding|RewardModel|MaskedLM|Model$": (
        "another task than to continue a text", f"take a model ...ForCausalLM, as {QWEN}",
    ),
}  # fmt: skip
_SUFFIX = re.compile(
    r"(?P<name>[\w.-]+?)-(FP8|AWQ|GPTQ|GGUF|INT[48]|W[48]A|bnb|[48]bit|MXFP|NVFP|quantized)", re.I
)


def unknown_architecture(fields: Fields, name: str, supported: str) -> Unsupported:
    """The error for an architecture that is no family's; supported: those that are."""
    field = "architectures"
    for pattern, (needs, instead) in NEEDED.items():
        if re.search(pattern, name):
            text = f"{name!r} is not supported, for it needs {needs}"
            return fields.unsupported(field, text, f"{instead}; supported: {supported}")
    remedy = f"take a model of an architecture that is: {supported}"
    return fields.unsupported(field, f"{name!r} is not supported", remedy)


def window_remedy(window: int) -> str:
    """What can be done about layers that see so many keys only."""
    if not window:
        return DENSE
    reason = "a window hides nothing in texts no longer than itself"
    return f"{reason}: set max_position_embeddings to {window} to serve those, or {DENSE}"


def unquantized(path: Path) -> str:
    """The model of which a quantized one in such a directory was made, if its name says so."""
    for part in reversed(path.parts):
        if found := _SUFFIX.match(part):
            name = found["name"].removeprefix("models--").replace("--", "/")
            return f"{name}, if that is what it was made from"
    return "the model that it was made from, whose name mostly lacks FP8, AWQ, GPTQ or the like"


def check_path(path: Path) -> None:
    """Refuse a model on the hub that is GGUF files alone, of which none is downloaded."""
    known = ("config.json", "tokenizer.json")
    is_empty = path.is_dir() and not all((path / name).exists() for name in known)
    if is_empty and "-gguf" in str(path).lower():
        text = f"{path} is a GGUF model; give the path of one of its files, downloaded by"
        raise Unsupported(
            f"{text} hf download NAME FILE --local-dir DIR; or take {unquantized(path)}"
        )
