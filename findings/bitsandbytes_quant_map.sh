#!/usr/bin/env bash
# bitsandbytes writes the values of its four-bit codes to files, and does not compute with them.
#
# A matrix in nf4 or fp4 is saved with a tensor `quant_map`: the sixteen numbers that codes stand for. QuantState.from_dict
# reads it into QuantState.code. But dequantize_4bit takes a table of its own, by the name in quant_state, so a file with
# another map gives the same numbers. (The map of the scales, nested_quant_map, is used.)
#
# What follows: a reader that follows the file gives other numbers than bitsandbytes; a map that is not the library's is
# better refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/packages" bitsandbytes==0.50.2 torch==2.13.0
cat > "$folder/program.py" <<'PROGRAM'
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit

codes, state = quantize_4bit(torch.linspace(-1, 1, 64 * 256).reshape(256, 64), quant_type="nf4", compress_statistics=True)
saved = state.as_dict(packed=True)

def numbers(**edit):
    return dequantize_4bit(codes, QuantState.from_dict({**saved, **edit}, torch.device("cpu")))

print("kinds:", sorted(saved))
print("quant_map doubled, other numbers:", not torch.equal(numbers(), numbers(quant_map=saved["quant_map"] * 2)))
doubled = numbers(nested_quant_map=saved["nested_quant_map"] * 2)
print("nested_quant_map doubled, other numbers:", not torch.equal(numbers(), doubled))
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
kinds: ['absmax', 'nested_absmax', 'nested_quant_map', 'quant_map', 'quant_state.bitsandbytes__nf4']
quant_map doubled, other numbers: False
nested_quant_map doubled, other numbers: True
EXPECTED
cd "$folder"
PYTHONPATH="$folder/packages" PYTHONWARNINGS=ignore python3 -s program.py > seen
cat seen
diff expected seen > /dev/null || { echo "CHANGED; it was:"; cat expected; exit 1; }
