"""Folders with tiny models and draft heads for tests, and the drafts of a head by plain NumPy in float64.

The reference follows vLLM's llama_eagle3.py and mimo_mtp.py, and knows no cache, blocks or batch.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from ipc.tables.arrays import Floats

Numbers = npt.NDArray[np.float64]
Weights = dict[str, Numbers]

VOCAB, HIDDEN, LAYERS = 300, 64, 6
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 0,
    "bos_token_id": None,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS, **_SIZES}
MIMO = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    **_SIZES,
}
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    **_SIZES,
    "draft_vocab_size": 120,
}


def layer_shapes(settings: Mapping[str, Any], inputs: int = 1, has_bias: bool = False) -> dict[str, tuple[int, ...]]:
    """The weights of a layer whose Q, K and V read `inputs` times the hidden size."""
    hidden, inner, width = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    sizes = {
        "q": settings["num_attention_heads"] * width,
        **dict.fromkeys("kv", settings["num_key_value_heads"] * width),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in sizes.items():
        shapes[f"self_attn.{name}_proj.weight"] = (size, inputs * hidden)
        if has_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    return shapes | {
        "self_attn.o_proj.weight": (hidden, sizes["q"]),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def model_shapes(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of a Llama, or of a MiMo with its layer for multi-token prediction."""
    has_bias, hidden = settings["model_type"] == "mimo", settings["hidden_size"]
    layers = {
        f"model.layers.{index}.{name}": shape
        for index in range(settings["num_hidden_layers"])
        for name, shape in layer_shapes(settings, has_bias=has_bias).items()
    }
    ends = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (settings["vocab_size"], hidden))
    shapes = ends | layers | {"model.norm.weight": (hidden,)}
    if has_bias:
        own = layer_shapes(settings, has_bias=True) | {"input_proj.weight": (hidden, 2 * hidden)}
        own |= {f"{name}_layernorm.weight": (hidden,) for name in ("token", "hidden", "final")}
        shapes |= {f"model.mtp_layers.0.{name}": shape for name, shape in own.items()}
    return shapes


def eagle3_shapes(settings: Mapping[str, Any], num_taps: int = 3, has_embeddings: bool = False) -> dict[str, Any]:
    """The weights of an EAGLE-3 head."""
    hidden = settings["hidden_size"]
    shapes = {f"midlayer.{name}": shape for name, shape in layer_shapes(settings, 2).items()}
    shapes |= {
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "fc.weight": (hidden, num_taps * hidden),
    }
    shapes |= {"lm_head.weight": (settings["draft_vocab_size"], hidden)}
    shapes |= {"embed_tokens.weight": (settings["vocab_size"], hidden)} if has_embeddings else {}
    return shapes | ({"input_norm.weight": (num_taps * hidden,)} if settings.get("norm_before_fc") else {})


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Floats]:
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, numbers in weights.items():
        if numbers.ndim == 2:
            numbers *= np.float32(1.5 * numbers.shape[1] ** -0.5)
        elif not name.endswith(".bias"):
            numbers[:] = 1 + np.float32(0.2) * numbers
    return weights


def random_d2t(settings: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    count = settings["draft_vocab_size"]
    ids = np.sort(np.random.Generator(np.random.PCG64(3)).permutation(settings["vocab_size"])[:count])
    distances: npt.NDArray[np.int64] = ids - np.arange(count)
    return distances


def write(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), folder / "model.safetensors")
    return str(folder)


def write_eagle3(folder: Path, settings: Mapping[str, Any] = EAGLE3, num_taps: int = 3, **shapes: bool) -> str:
    """A random head; its tokens are some of the model's."""
    d2t = random_d2t(settings)
    t2d = np.zeros(settings["vocab_size"], np.bool_)
    t2d[d2t + np.arange(len(d2t))] = True
    return write(
        folder, settings, {**random_weights(eagle3_shapes(settings, num_taps, **shapes), 2), "d2t": d2t, "t2d": t2d}
    )


class Reference:
    """A model and a draft head, as folders of this module, in float64."""

    def __init__(self, model: Path, head: Path | None, taps: Iterable[int]) -> None:
        """head: an EAGLE-3 head; None: the model's layer for multi-token prediction."""
        self.settings = json.loads((model / "config.json").read_text())
        self.weights = self._read(model)
        self.head = None if head is None else self._read(head)
        self.head_settings = {} if head is None else json.loads((head / "config.json").read_text())
        self.taps = tuple(taps)

    @staticmethod
    def _read(folder: Path) -> Weights:
        return {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}

    def check(self, tokens: list[int], drafts: list[int], tolerance: float = 1e-3) -> None:
        """Each draft is a largest logit of the head after the tokens and the drafts before it."""
        states = self._states(np.array(tokens[:-1]))
        ids = [*tokens[1:]]
        for index, draft in enumerate(drafts):
            out, logits = self._run(np.array(ids), states)
            assert logits[draft] >= logits.max() - tolerance, (index, draft, int(logits.argmax()))
            ids.append(draft)
            states = np.concatenate((states, out[-1:]))

    def _states(self, ids: npt.NDArray[np.int64]) -> Numbers:
        hidden, taps = self.weights["model.embed_tokens.weight"][ids], dict[int, Numbers]()
        for index in range(self.settings["num_hidden_layers"]):
            layer = _under(self.weights, f"model.layers.{index}.")
            hidden = _layer(layer, self.settings, _norm(hidden, layer["input_layernorm.weight"]), hidden)
            taps[index + 1] = hidden
        if self.head is None:
            return hidden
        joined = np.concatenate([taps[place] for place in self.taps], 1)
        if "input_norm.weight" in self.head:
            joined = _norm(joined, self.head["input_norm.weight"])
        return joined @ self.head["fc.weight"].T

    def _run(self, ids: npt.NDArray[np.int64], states: Numbers) -> tuple[Numbers, Numbers]:
        """The states after each token, and the logits [vocab] after the last one."""
        embedded = self.weights["model.embed_tokens.weight"][ids]
        if self.head is None:
            layer = _under(self.weights, "model.mtp_layers.0.")
            embedded[0] = 0
            parts = _norm(states, layer["hidden_layernorm.weight"]), _norm(embedded, layer["token_layernorm.weight"])
            residual = np.concatenate(parts, 1) @ layer["input_proj.weight"].T
            out = _layer(layer, self.settings, _norm(residual, layer["input_layernorm.weight"]), residual)
            return out, _norm(out[-1], layer["final_layernorm.weight"]) @ self.weights["lm_head.weight"].T
        head, layer = self.head, _under(self.head, "midlayer.")
        embedded = head["embed_tokens.weight"][ids] if "embed_tokens.weight" in head else embedded
        normed = _norm(states, layer["hidden_norm.weight"])
        x = np.concatenate((_norm(embedded, layer["input_layernorm.weight"]), normed), 1)
        out = _layer(layer, self.settings, x, normed if self.head_settings.get("norm_before_residual") else states)
        found = _norm(out[-1], head["norm.weight"]) @ head["lm_head.weight"].T
        logits = np.full(VOCAB, -np.inf)
        logits[np.arange(len(found)) + head["d2t"].astype(np.int64)] = found
        return out, logits


def _under(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def _norm(x: Numbers, weight: Numbers) -> Numbers:
    scaled: Numbers = x / np.sqrt((x * x).mean(-1, keepdims=True) + _SIZES["rms_norm_eps"]) * weight
    return scaled


def _layer(layer: Weights, settings: Mapping[str, Any], x: Numbers, residual: Numbers) -> Numbers:
    """What a layer makes of the residual stream, if Q, K and V read x."""
    heads, width, count = settings["num_attention_heads"], settings["head_dim"], len(x)
    q, k, v = (
        (x @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(f"self_attn.{name}_proj.bias", 0.0)).reshape(
            count, -1, width
        )
        for name in "qkv"
    )
    q, k, v = _rotated(q), _rotated(k).repeat(heads // k.shape[1], 1), v.repeat(heads // v.shape[1], 1)
    scores = np.einsum("ihd,jhd->hij", q, k) * width**-0.5
    scores[:, np.triu(np.ones((count, count), np.bool_), 1)] = -np.inf
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    attended = np.einsum("hij,jhd->ihd", chances, v).reshape(count, -1)
    hidden = residual + attended @ layer["self_attn.o_proj.weight"].T
    normed = _norm(hidden, layer["post_attention_layernorm.weight"])
    gate = normed @ layer["mlp.gate_proj.weight"].T
    up = normed @ layer["mlp.up_proj.weight"].T
    result: Numbers = hidden + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    return result


def _rotated(x: Numbers) -> Numbers:
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * _SIZES["rope_theta"] ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
