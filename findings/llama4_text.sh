#!/usr/bin/env bash
# Llama 4 with its image encoder does not answer a prompt of text alone.
#
# Llama4ForConditionalGeneration is the class of the published checkpoints. As with other models that see images, one
# expects that a prompt without an image works. Here forward() without pixel_values raises an AttributeError, because it
# asks the text model's output for image_outputs. Its language_model answers the same prompt, and LLaVA's class does.
#
# What follows: our text of Llama 4 is compared with language_model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/packages" transformers==5.24.0 torch==2.13.0
cat > "$folder/program.py" <<'PROGRAM'
import torch
from transformers import (
    CLIPVisionConfig,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
routed = {"intermediate_size_mlp": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
eyes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
widths = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
llama4 = Llama4ForConditionalGeneration(
    Llama4Config(text_config={**sizes, **heads, **routed}, vision_config={**eyes, **widths, "patch_size": 14})
)
llava = LlavaForConditionalGeneration(
    LlavaConfig(text_config=LlamaConfig(**sizes, **heads), vision_config=CLIPVisionConfig(**eyes, patch_size=14))
)
ids = torch.tensor([[1, 2, 3, 4]])


def seen(model):
    try:
        return f"logits {list(model(input_ids=ids).logits.shape)}"
    except AttributeError as error:
        return f"AttributeError: {error}"


print("Llama 4:", seen(llama4))
print("its language_model:", seen(llama4.language_model))
print("LLaVA:", seen(llava))
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
Llama 4: AttributeError: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'
its language_model: logits [1, 4, 64]
LLaVA: logits [1, 4, 64]
EXPECTED
cd "$folder"
PYTHONPATH="$folder/packages" PYTHONWARNINGS=ignore python3 -s program.py > seen 2> errors || { cat errors; exit 1; }
cat seen
diff expected seen > /dev/null || { echo "CHANGED; it was:"; cat expected; exit 1; }
