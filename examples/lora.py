"""One batch with and without an adapter. It first writes a tiny random one, in the form that PEFT saves.

`python lora.py [FOLDER]` keeps the adapter in FOLDER. Your own: pass a folder that PEFT's save_pretrained() made, or a
GGUF file, to LoRARequest.
"""

import json
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

from engine_core import LLM, LoRARequest, SamplingParams

LAYERS, HIDDEN, RANK = 30, 576, 4  # of the demo model, SmolLM2-135M-Instruct


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 tensors: eight bytes with the header's length, the header as JSON, the numbers."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.tobytes() for tensor in tensors.values()))


def write_adapter(folder: Path) -> None:
    """Write an adapter of the demo model's query projections, A [RANK, HIDDEN] and B [HIDDEN, RANK] in float32."""
    generator, tensors = np.random.default_rng(1), {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = generator.standard_normal((RANK, HIDDEN), np.float32) / HIDDEN**0.5
        tensors[f"{name}.lora_B.weight"] = generator.standard_normal((HIDDEN, RANK), np.float32) / RANK**0.5
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def run(folder: Path) -> None:
    """Ask once with the adapter and once without, in one batch."""
    adapter = LoRARequest("tiny", 1, str(folder))
    with LLM(enable_lora=True, max_model_len=2048) as llm:
        prompts = ["The capital of France is"] * 2
        greedy = SamplingParams(temperature=0, max_tokens=12)
        outputs = llm.generate(prompts, greedy, lora_request=[adapter, None], use_tqdm=False)
    for name, output in zip(("with", "without"), outputs, strict=True):
        print(f"{name}: {output.outputs[0].text!r}")


def main() -> None:
    """Write the adapter, to a temporary folder if none is named, and use it."""
    if len(sys.argv) > 1:
        write_adapter(Path(sys.argv[1]))
        run(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder))
        run(Path(folder))


if __name__ == "__main__":
    main()
