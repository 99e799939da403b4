"""A folder with the config of a tiny LFM2, for weights that are made up."""

import json
from pathlib import Path

SETTINGS = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def lfm2_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    return folder
