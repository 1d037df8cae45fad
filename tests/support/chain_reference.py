"""What a chain drafter must propose and store: recomputed from the whole text, in plain torch.

Written from the published checkpoint forms alone. The target is run by `transformers`, in float32
and without a cache. The drafter is one layer over pairs: slot t holds (token t, feature of token
t - 1), so slot 0 has none, and nothing attends to it. Nothing here is shared with the worker but
the definition of the noise.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from benchmarks.train.model import apart
from worker.api import Sampling
from worker.ops.philox import gumbel_ref

MTP_PREFIXES = "model.mtp_layers.0.", "mtp."  # MiMo's, and that of Qwen3-Next and Qwen3.5
QWEN2_LIKE = "mimo"  # model_type of targets that are Qwen2 beside their MTP layers


def draw(
    logits: Tensor, ids: Tensor, temperature: float, seed: Tensor, position: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Draw drafts: no filters, penalties or masks; the target's noise, at the target's ids.

    logits: [n, num] f32, of the target's `ids`, [num]; seed, position: [n] i64, of the requests and
    of the tokens to be drawn. Returns the drafts, and by how much each was the likeliest: [n].
    """
    if temperature > 0:
        logits = logits / temperature + gumbel_ref(seed, position, vocab_size)[:, ids]
    best, second = logits.topk(2).values.unbind(1)
    return ids[logits.argmax(1)], best - second


def tapped_layers(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Layers of the target behind which an EAGLE-3 drafter taps the residual, counted from 0."""
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if inner is not None:
        return list(inner)
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    if inputs is None:
        inputs = [2, num_layers // 2, num_layers - 3]
    return [layer - 1 for layer in inputs]


def short_name(name: str) -> str:
    """A tensor's name without what differs between the forms."""
    others = "model.", "midlayer.", "layers.0.", "self_attn.", "mlp."
    for prefix in (*MTP_PREFIXES, *others):
        name = name.removeprefix(prefix)
    return name.removesuffix(".weight")


class Weights:
    """A drafter's tensors, float32, by what `short_name` makes of their names; and what any layer
    computes with them."""

    def __init__(self, directory: Path, short_name: Callable[[str], str]) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = json.loads((directory / "config.json").read_text())
        self.config = config | (config.get("transformer_layer_config") or {})
        found: dict[str, Tensor] = {}
        for file in directory.glob("*.safetensors"):
            found |= load_file(file)
        self.is_mtp = any(name.startswith(MTP_PREFIXES) for name in found)
        if self.is_mtp:  # beside the target's
            found = {name: found[name] for name in found if name.startswith(MTP_PREFIXES)}
            found = apart(found)
        self.is_hybrid = "mtp.fc.weight" in found  # norms are stored minus 1, attention has a gate
        self.weights = {
            short_name(name): each.float() if each.is_floating_point() else each
            for name, each in found.items()
        }
        hidden, num_heads = self.config["hidden_size"], self.config["num_attention_heads"]
        self.num_kv_heads = self.config.get("num_key_value_heads") or num_heads
        self.head_dim = self.config.get("head_dim") or hidden // num_heads
        rope = self.config.get("rope_parameters") or self.config
        part = rope.get("partial_rotary_factor", 0.25) if self.is_hybrid else 1
        self.rotary_dim = int(self.head_dim * part)  # rows of a head that are turned
        described = {**self.config, "head_dim": self.rotary_dim}
        if part < 1:
            described["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": rope["rope_theta"],
            }
        self._rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(described))  # (cos, sin)

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config.get("rms_norm_eps", 1e-6)
        return rms_norm(x, x.shape[-1:], self.weights[name] + self.is_hybrid, eps)

    def project(self, name: str, x: Tensor) -> Tensor:
        """A linear layer, with its bias if it has one."""
        return linear(x, self.weights[name], self.weights.get(f"{name}.bias"))

    def heads(self, name: str, x: Tensor, positions: Tensor) -> Tensor:
        """[n, heads, head_dim] of a layer's "q", "k" or "v"; q and k are rotated."""
        out = self.project(f"{name}_proj", x).unflatten(-1, (-1, self.head_dim))
        if name == "q" and self.is_hybrid:
            out = out[:, ::2]  # each head's gate stands behind it
        if name.endswith("v"):
            return out
        if f"{name}_norm" in self.weights:
            out = self.norm(f"{name}_norm", out)
        from transformers.models.llama.modeling_llama import rotate_half

        cos, sin = (each[0][:, None] for each in self._rotary(out, positions[None]))
        turned, still = out[..., : self.rotary_dim], out[..., self.rotary_dim :]
        return torch.cat((turned * cos + rotate_half(turned) * sin, still), -1)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """query: [n, heads, d]; keys, values: [m, kv heads, d]; mask: [n, m], True: attended to."""
        parts = (each.transpose(0, 1) for each in (query, keys, values))
        out = scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)

    def gated(self, x: Tensor, at: str = "") -> Tensor:
        """The input of a layer's down projection."""
        return silu(self.project(f"{at}gate_proj", x)) * self.project(f"{at}up_proj", x)

    def fed_forward(self, x: Tensor) -> Tensor:
        """What the feed-forward adds; of experts one token after the other."""
        if "gate" not in self.weights:
            return self.project("down_proj", self.gated(x))
        found = []
        for token in x[:, None]:
            scores, ids = (
                self.project("gate", token)[0].softmax(0).topk(self.config["num_experts_per_tok"])
            )
            if self.config.get("norm_topk_prob", True):
                scores = scores / scores.sum()
            shared = self.project("shared_expert.down_proj", self.gated(token, "shared_expert."))
            total = torch.sigmoid(self.project("shared_expert_gate", token)) * shared
            for score, number in zip(scores, ids.tolist(), strict=True):
                at = f"experts.{number}."
                total = total + score * self.project(f"{at}down_proj", self.gated(token, at))
            found.append(total)
        return torch.cat(found)


class Layer(Weights):
    """The layer of a chain drafter: EAGLE-3 (original, SpecForge or speculators), EAGLE-1 and 2, or
    MTP as MiMo has it, or Qwen3-Next and Qwen3.5. `attend` is all that mixes rows."""

    def __init__(self, directory: Path, num_layers: int) -> None:  # of the target
        super().__init__(directory, short_name)
        self.kind = "mtp" if self.is_mtp else "eagle"
        if "hidden_norm" in self.weights:
            self.kind = "eagle3"
        self.taps = tapped_layers(self.config, num_layers) if self.kind == "eagle3" else []
        inner = self.config.get("eagle_config") or {}
        if not inner.get("use_aux_hidden_state", True):
            self.taps = []
        fed_back = inner.get("return_hidden_post_norm", self.config.get("norm_output"))
        self.feeds_normed = self.kind == "mtp" or bool(fed_back)

    def features(self, taps: Sequence[Tensor], last: Tensor) -> Tensor:
        """Features of tokens: taps: residuals behind the tapped layers; last: normed output."""
        if not taps:
            return last
        if "fc_norm.0" in self.weights:
            taps = [self.norm(f"fc_norm.{i}", each) for i, each in enumerate(taps)]
        joined = torch.cat(list(taps), -1)
        if "input_norm" in self.weights:
            joined = self.norm("input_norm", joined)
        return self.project("fc", joined)

    def inputs(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """(input of q, k and v, residual) of pairs, one in each row."""
        if self.kind == "eagle3":
            normed = self.norm("hidden_norm", features)
            joined = torch.cat((self.norm("input_layernorm", embedded), normed), -1)
            return joined, normed if self.config.get("norm_before_residual") else features
        if self.kind == "eagle":
            mixed = self.project("fc", torch.cat((embedded, features), -1))
            return mixed, mixed
        if self.is_hybrid:
            token = self.norm("pre_fc_norm_embedding", embedded)
            pair = token, self.norm("pre_fc_norm_hidden", features)
            mixed = self.project("fc", torch.cat(pair, -1))
            return self.norm("input_layernorm", mixed), mixed
        hidden = self.norm("hidden_layernorm", features)
        token = self.norm("token_layernorm", embedded)
        mixed = self.project("input_proj", torch.cat((hidden, token), -1))
        return self.norm("input_layernorm", mixed), mixed

    def let_through(self, x: Tensor, attended: Tensor) -> Tensor:
        """What the gates of x, the input of q, leave of what its heads have attended to."""
        if not self.is_hybrid:
            return attended
        gates = self.project("q_proj", x).unflatten(-1, (-1, self.head_dim))[:, 1::2]
        return attended * torch.sigmoid(gates.flatten(1))

    def outputs(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what the head is applied to, what is fed back as the next row's feature)."""
        hidden = residual + self.project("o_proj", attended)
        hidden = hidden + self.fed_forward(self.norm("post_attention_layernorm", hidden))
        if self.kind == "eagle":
            return hidden, hidden
        name = "norm" if self.kind == "eagle3" or self.is_hybrid else "final_layernorm"
        normed = self.norm(name, hidden)
        return normed, normed if self.feeds_normed else hidden


Rows: TypeAlias = list[tuple[Tensor, Tensor]]  # keys and values of each layer
Drawn: TypeAlias = list[tuple[int, float]]  # drafts, each with its margin, see `draw`


class Reference(ABC):
    """A target, by its directory as `transformers` reads it, and a drafter's weights."""

    first_slot = 0  # of the draft region that has a row

    def __init__(self, target: Path, net: Weights) -> None:
        self.target, weights = load_target(target), net.weights
        own = weights.get("embed_tokens")
        self.embedding = self.target.get_input_embeddings().weight if own is None else own
        own = weights.get("lm_head")
        self.head = self.target.get_output_embeddings().weight if own is None else own
        self.vocab_size = self.target.config.vocab_size
        self.ids = torch.arange(len(self.head)) + weights.get("d2t", 0)
        self._texts: dict[tuple[int, ...], tuple[Tensor, Rows]] = {}
        self._drawn: dict[tuple, Drawn] = {}

    def features(self, tokens: Sequence[int]) -> Tensor:
        """[n, hidden]: what the drafter makes of the target's features of each token."""
        return self._of(tokens)[0][: len(tokens)]

    def draft_rows(self, tokens: Sequence[int]) -> Rows:
        """Of each layer, keys and values of slots 0 .. n - 1, [n, num_kv_heads, head_dim]; NaN
        before `first_slot`."""
        num = len(tokens)
        return [(keys[:num], values[:num]) for keys, values in self._of(tokens)[1]]

    def tails(self, tokens: Sequence[int], page_size: int) -> dict[int, Tensor]:
        """Number of each page of the text -> feature of its last token, if a drafter needs that;
        all have target KV."""
        return {}

    def drafts(
        self, tokens: Sequence[int], length: int, width: int, sampling: Sampling
    ) -> list[int]:
        """Drafts for positions length + 1 .. length + width - 1, as target ids.

        length: of the row's KV, at least 1; tokens[length] has been drawn, later ones do not count.
        """
        return [draft for draft, _ in self.drawn(tokens, length, width, sampling)]

    def drawn(
        self, tokens: Sequence[int], length: int, width: int, sampling: Sampling, block: int = 0
    ) -> Drawn:
        """`drafts`, each with its margin; block: tokens of a drafter's block; 0: `width`."""
        assert 0 < length < len(tokens)
        block = block or width
        key = tuple(tokens[: length + 1]), block, sampling.temperature, sampling.seed
        if key not in self._drawn:
            self._drawn[key] = self._propose(tokens, length, block, sampling)
        return self._drawn[key][: width - 1]

    def _draw(self, rows: Tensor, at: Tensor, sampling: Sampling) -> Drawn:
        """Drafts for positions `at`, of what the head takes."""
        seed, logits = torch.tensor([sampling.seed]).expand(len(at)), linear(rows, self.head)
        found = draw(logits, self.ids, sampling.temperature, seed, at, self.vocab_size)
        return list(zip(*(each.tolist() for each in found), strict=True))

    def _of(self, tokens: Sequence[int]) -> tuple[Tensor, Rows]:
        """Features and rows of a text that begins so; one forward for each that is new."""
        known = tuple(tokens)
        for text, found in self._texts.items():
            if text[: len(known)] == known:
                return found
        with torch.no_grad():
            behind, last = behind_layers(self.target, torch.tensor(known))
            self._texts[known] = self._read(torch.tensor(known), behind, last)
        return self._texts[known]

    @abstractmethod
    def _read(self, ids: Tensor, behind: list[Tensor], last: Tensor) -> tuple[Tensor, Rows]: ...

    @abstractmethod
    def _propose(
        self, tokens: Sequence[int], length: int, block: int, sampling: Sampling
    ) -> Drawn: ...


class ChainReference(Reference):
    """A target and its chain drafter, by directories; an MTP layer's may be the target's own."""

    first_slot = 1

    def __init__(self, target: Path, drafter: Path) -> None:
        self.layer = Layer(drafter, load_target(target).config.num_hidden_layers)
        super().__init__(target, self.layer)

    def tails(self, tokens: Sequence[int], page_size: int) -> dict[int, Tensor]:
        features, num = self.features(tokens), len(tokens)
        starts = range(0, num, page_size)
        return {start // page_size: features[min(start + page_size, num) - 1] for start in starts}

    def drawn(
        self, tokens: Sequence[int], length: int, width: int, sampling: Sampling, block: int = 0
    ) -> Drawn:
        return super().drawn(tokens, length, width, sampling)

    @torch.no_grad()
    def _propose(self, tokens: Sequence[int], length: int, block: int, sampling: Sampling) -> Drawn:
        layer, found = self.layer, Drawn()
        ((keys, values),) = self.draft_rows(tokens)
        keys, values = keys[1:length], values[1:length]
        token, feature = tokens[length], self.features(tokens)[length - 1 : length]
        for slot in range(length, length + block - 1):
            at = torch.tensor([slot])
            x, residual = layer.inputs(self.embedding[token][None], feature)
            keys = torch.cat((keys, layer.heads("k", x, at)))
            values = torch.cat((values, layer.heads("v", x, at)))
            mask = torch.ones(1, len(keys), dtype=torch.bool)
            attended = layer.attend(layer.heads("q", x, at), keys, values, mask)
            normed, feature = layer.outputs(layer.let_through(x, attended), residual)
            found += self._draw(normed, at + 1, sampling)
            token = found[-1][0]
        return found

    def _read(self, ids: Tensor, behind: list[Tensor], last: Tensor) -> tuple[Tensor, Rows]:
        layer, at = self.layer, torch.arange(1, len(ids))
        features = layer.features([behind[number] for number in layer.taps], last)
        x, _ = layer.inputs(embedding(ids[1:], self.embedding), features[:-1])
        none = torch.full((1, layer.num_kv_heads, layer.head_dim), float("nan"))
        keys, values = (torch.cat((none, layer.heads(name, x, at))) for name in "kv")
        return features, [(keys, values)]


def behind_layers(target: Any, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Residuals behind each layer of a target, and its normed output; [n, hidden] each."""
    body, num_layers, raw = target.base_model, target.config.num_hidden_layers, []
    hook = body.norm.register_forward_pre_hook(lambda _, args: raw.append(args[0]))
    out = body(ids[None], use_cache=False, output_hidden_states=True)
    hook.remove()
    # hidden_states[i] is the input of layer i; the last one of them is normed.
    behind = [*out.hidden_states[1:num_layers], raw[0]]
    return [each[0] for each in behind], out.last_hidden_state[0]


@lru_cache(maxsize=1)
def load_target(directory: Path) -> Any:
    """The target, in float32; one for all drafters of it, as nobody changes it."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config  # takes seconds

    kind = json.loads((directory / "config.json").read_text()).get("model_type")
    read = Qwen2Config if kind == QWEN2_LIKE else AutoConfig
    config = read.from_pretrained(directory)
    options: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, config=config, **options).eval()
