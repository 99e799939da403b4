"""Random adapters, written as PEFT's save_pretrained() writes them. PEFT itself is not needed."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ipc.tables.arrays import Floats

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def matrix_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """[out, in] of every matrix of a decoder with the settings of a transformers config, or of ours."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    hidden, middle = config.hidden_size, config.intermediate_size
    shapes = {"self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden)}
    shapes |= {"self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads)}
    shapes |= {"mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden), "mlp.down_proj": (hidden, middle)}
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config.num_hidden_layers)
        for name, shape in shapes.items()
    }


def random_matrices(
    shapes: Mapping[str, tuple[int, int]],
    rank: int,
    seed: int,
    targets: Iterable[str] = TARGETS,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.5,
) -> dict[str, tuple[Floats, Floats]]:
    """A and B of every matrix whose name ends with a target. size: of B @ A beside a matrix of numbers around 1."""
    generator, found = np.random.default_rng(seed), {}
    for name, (columns, depth) in shapes.items():
        last = name.rsplit(".", 1)[-1]
        if last in targets:
            own = (ranks or {}).get(last, rank)
            a = generator.standard_normal((own, depth), np.float32) * np.float32(depth**-0.5)
            b = generator.standard_normal((columns, own), np.float32) * np.float32(size * own**-0.5)
            found[name] = (a, b)
    return found


def write_peft(
    folder: Path,
    matrices: Mapping[str, tuple[Floats, Floats]],
    *,
    rank: int,
    alpha: float,
    prefix: str = "base_model.model.",
    **settings: Any,
) -> Path:
    """Write an adapter; settings: more of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in matrices.items():
        tensors[f"{prefix}{name}.lora_A.weight"], tensors[f"{prefix}{name}.lora_B.weight"] = a, b
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "auto_mapping": None,
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "r": rank,
        "runtime_config": {"ephemeral_gpu_offload": False},
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in matrices}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder
