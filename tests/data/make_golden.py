"""Writes golden_smollm2.json: float32 greedy continuations of the demo model by transformers, for test_golden.py.

usage: python tests/data/make_golden.py        (needs transformers and gguf; about two minutes)
"""

import json
from pathlib import Path
from typing import Any

from ipc.files.model_files import resolve_model

NUM_TOKENS = 64
OUT = Path(__file__).with_name("golden_smollm2.json")

CODE = '''def quicksort(items):
    """Sort a list."""
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    left = [x for x in items if x < pivot]
'''
LONG = (
    "The lighthouse keeper wrote in his journal every evening. He noted the wind, the height of the waves and the "
    "ships that passed. On some nights nothing happened at all, and he wrote that too. "
) * 14


def load_oracle() -> tuple[Any, Any]:
    """(model, tokenizer) of the demo GGUF by transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model(None)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval(), tokenizer


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation; EOS does not end it."""
    import torch

    with torch.inference_mode():
        ids, cache, output = torch.tensor([prompt]), None, []
        for _ in range(count):
            result = model(ids, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            token = int(result.logits[0, -1].argmax())
            output.append(token)
            ids = torch.tensor([[token]])
    return output


def prompts(tokenizer: Any) -> dict[str, list[int]]:
    def chat(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def text(value: str) -> list[int]:
        return list(tokenizer(value, add_special_tokens=False)["input_ids"])

    return {
        "chat": chat("What is the capital of France, and what is it known for?"),
        "chat_list": chat("Give me three tips for learning to play the piano."),
        "code": text(CODE),
        "long": text(LONG),
        "single_token": text("The"),
        "unicode": text("Ich möchte größere Übungen für Anfänger: 日本語, ελληνικά, 🙂 und naïve café"),
        "numbers": text("1, 2, 4, 8, 16, 32, 64,"),
    }


def main() -> None:
    import transformers

    model, tokenizer = load_oracle()
    rows = [
        {"name": name, "prompt_token_ids": ids, "token_ids": greedy(model, ids, NUM_TOKENS)}
        for name, ids in prompts(tokenizer).items()
    ]
    header = {"model": resolve_model(None).name, "transformers": transformers.__version__, "dtype": "float32"}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    OUT.write_text(json.dumps(header)[:-1] + ', "prompts": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
