"""A one-layer random Llama, for runs that measure almost only the engine's own overhead."""

import json
from pathlib import Path

import numpy as np

VOCAB_SIZE = 2048
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 128, 2, 1, 32
_STD = 0.02  # of the weights, as in transformers' initialization


def write_tiny_model(folder: Path) -> None:
    """Write config.json and model.safetensors (bfloat16, no tokenizer) into the folder: the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(), indent=1))
    rng = np.random.default_rng(0)
    header: dict[str, object] = {}
    parts: list[bytes] = []
    offset = 0
    for name, shape in _shapes().items():
        values = np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0.0, _STD, shape).astype(np.float32)
        # The upper half of a float32 is a bfloat16, rounded toward zero.
        data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format requires data aligned to 8 bytes
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": (VOCAB_SIZE, _HIDDEN),
        layer + "input_layernorm.weight": (_HIDDEN,),
        layer + "self_attn.q_proj.weight": (_HEADS * _HEAD_DIM, _HIDDEN),
        layer + "self_attn.k_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        layer + "self_attn.v_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        layer + "self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD_DIM),
        layer + "post_attention_layernorm.weight": (_HIDDEN,),
        layer + "mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
        layer + "mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
        layer + "mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        "model.norm.weight": (_HIDDEN,),
    }
