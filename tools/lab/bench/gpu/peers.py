"""What else a GPU's machine has for the same work: transformers' generate(), and torch's product of FP8 numbers."""

import time
from typing import Any

import torch

from ipc.files.model_files import resolve_model

NEW_TOKENS = 128
PROMPT_TOKENS = 128
_SHAPES = (8, 4096, 4096), (4096, 4096, 28672)


def generate(model: str | None, *, compiles: bool = True, num_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Return the tokens a second of transformers' generate() for one greedy request, after a first one.

    model: None = the demo model. compiles: with a static cache under torch.compile, otherwise without.
    """
    from transformers import AutoModelForCausalLM  # takes seconds, and only this item needs it

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=torch.bfloat16)
    loaded = loaded.to(device).eval()
    prompt = torch.arange(3, 3 + PROMPT_TOKENS, device=device)[None] % loaded.config.vocab_size
    options: dict[str, Any] = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
    if compiles:
        options["cache_implementation"] = "static"
        loaded.forward = torch.compile(loaded.forward, mode="reduce-overhead")
    mask, seconds = torch.ones_like(prompt), list[float]()
    with torch.inference_mode():
        for _ in range(2):  # the first one compiles
            begin = time.perf_counter()
            tokens = loaded.generate(prompt, attention_mask=mask, **options)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
    count = tokens.shape[1] - prompt.shape[1]
    return {"new_tokens": count, "first_s": seconds[0], "tokens_per_s": count / seconds[1]}


def scaled_products() -> dict[str, Any]:
    """Return the microseconds of torch's products of FP8 and of bfloat16 numbers, by rows x depth x columns."""
    from triton.testing import do_bench  # the report is also read where triton is not installed

    found = dict[str, Any]()
    one = torch.ones((), device="cuda")
    for rows, depth, columns in _SHAPES:
        x, weight = torch.randn(rows, depth, device="cuda"), torch.randn(columns, depth, device="cuda")
        small, halves = ((part.to(dtype) for part in (x, weight)) for dtype in (torch.float8_e4m3fn, torch.bfloat16))
        a, b = small
        left, right = halves
        name = f"{rows} x {depth} x {columns}"
        found[f"fp8 {name}"] = 1e3 * do_bench(
            lambda a=a, b=b: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        )
        found[f"bf16 {name}"] = 1e3 * do_bench(lambda left=left, right=right: left @ right.T)
    return found
