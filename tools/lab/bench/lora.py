"""The cost of adapters (LoRA): batch8 on an engine without them, turn about with one that has eight.

Cases: "none" = the engine has adapters, but no request uses one; "one" = all eight requests use the same; "eight" =
each uses its own. The adapters are random, of one rank, on every linear layer. Ratios are of median output tokens a
second: 1 = as fast as the engine without adapters. The tokens of the case "none" must be the base's.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from frontend.llm import LLM
from frontend.lora import LoRARequest
from ipc.errors import ConfigError
from ipc.files.model_files import resolve_model
from ipc.options.given_options import config_from_options
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.version import NAME, VERSION
from tools.lab.bench.workloads import make_workload

_NUM_ADAPTERS = 8
_RANKS = (16,)
_WORKLOAD = "batch8"
_CASES = ("base", "none", "one", "eight")


def measure_lora(options: dict[str, Any], *, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each rank and case. options: of the engine. Errors: those of LLM; ConfigError."""
    if resolve_model(config_from_options(**options).model).suffix == ".gguf":
        raise ConfigError("lora measures models in a folder, whose config.json has their sizes")
    for rank in _RANKS:
        with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
            yield from _measure(options, rank, Path(folder), rounds)


def _measure(options: dict[str, Any], rank: int, folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    model = resolve_model(config_from_options(**options).model)
    asked = [
        LoRARequest(f"a{number}", number + 1, str(write_random_adapter(folder / f"{number}", model, rank, number)))
        for number in range(_NUM_ADAPTERS)
    ]
    requests: dict[str, list[LoRARequest | None]] = {
        "base": [None] * _NUM_ADAPTERS,
        "none": [None] * _NUM_ADAPTERS,
        "one": [asked[0]] * _NUM_ADAPTERS,
        "eight": list(asked),
    }
    adapted = {"enable_lora": True, "max_loras": _NUM_ADAPTERS, "max_lora_rank": rank}
    seconds: dict[str, list[float]] = {case: [] for case in _CASES}
    tokens: dict[str, list[list[int]]] = {}
    options = {**options, "skip_tokenizer_init": True}  # prompts are token ids
    with LLM(**options) as base, LLM(**{**options, **adapted}) as with_adapters:
        begin = time.monotonic()
        with_adapters._engine.adapters.of_prompts(list(asked), len(asked))
        load_s = time.monotonic() - begin
        num_bytes = with_adapters.client.list_lora()[0].num_bytes
        for round_ in range(-1, rounds):  # the first warms up
            cases = _CASES if round_ % 2 else _CASES[::-1]
            for case in cases:
                taken, found = _run(base if case == "base" else with_adapters, requests[case], round_)
                if round_ >= 0:
                    seconds[case].append(taken)
                    tokens.setdefault(case, found)
    num_tokens = make_workload(_WORKLOAD).num_output_tokens
    usual = statistics.median(seconds["base"])
    for case in _CASES[1:]:
        median = statistics.median(seconds[case])
        yield {
            "engine": NAME,
            "version": VERSION,
            "workload": "lora",
            "case": case,
            "rank": rank,
            "dtype": options.get("dtype"),
            "rounds": rounds,
            "adapter_bytes": num_bytes,
            "load_ms": round(load_s / _NUM_ADAPTERS * 1000, 1),
            "tokens_per_s_base": round(num_tokens / usual, 2),
            "tokens_per_s": round(num_tokens / median, 2),
            "ratio": round(usual / median, 3),
            "has_tokens_of_base": tokens[case] == tokens["base"],
        }


def _run(llm: LLM, adapters: list[LoRARequest | None], round_: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of a round, and its tokens. Rounds have different prompts, because repeated ones would be
    cached.
    """
    requests = make_workload(_WORKLOAD).shifted(64 + round_).requests
    kind = RequestOutputKind.FINAL_ONLY
    params = [
        SamplingParams(temperature=0, max_tokens=one.max_tokens, ignore_eos=True, detokenize=False, output_kind=kind)
        for one in requests
    ]
    prompts: Any = [{"prompt_token_ids": one.prompt} for one in requests]
    begin = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return time.monotonic() - begin, [list(output.outputs[0].token_ids) for output in outputs]


def write_random_adapter(folder: Path, model: Path, rank: int, seed: int) -> Path:
    """Write an adapter as PEFT does, on every linear layer of a model's folder; return its folder."""
    sizes = json.loads((model / "config.json").read_bytes())
    hidden, middle, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    head_dim = sizes.get("head_dim") or hidden // heads
    query, keys = heads * head_dim, sizes["num_key_value_heads"] * head_dim
    shapes = {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (keys, hidden)}
    shapes |= {"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, query)}
    shapes |= {"mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden), "mlp.down_proj": (hidden, middle)}
    rng, header, parts, offset = np.random.default_rng(seed), dict[str, Any](), list[bytes](), 0
    for layer in range(sizes["num_hidden_layers"]):
        for name, (columns, depth) in shapes.items():
            for part, shape in (("A", (rank, depth)), ("B", (columns, rank))):
                data = (rng.standard_normal(shape, np.float32) * np.float32(0.02)).tobytes()
                place = [offset, offset + len(data)]
                header[f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"] = {
                    "dtype": "F32",
                    "shape": list(shape),
                    "data_offsets": place,
                }
                parts.append(data)
                offset += len(data)
    folder.mkdir(parents=True)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text + b"".join(parts)
    (folder / "adapter_model.safetensors").write_bytes(content)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
