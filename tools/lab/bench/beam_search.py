"""Beam search compared with transformers' own: the same prompts and the same model, turn about on this machine.

A prompt has 128 tokens, and each sequence 64 more; EOS is ignored, so that both do the same work. Four concurrent
greedy requests without a search show what the beams cost beyond their tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from frontend.llm import LLM
from ipc.files.model_files import resolve_model
from ipc.machine.cpus import usable_cpus
from ipc.params.beam_search import BeamSearchParams
from ipc.version import NAME, VERSION
from tools.lab.bench.runs import request_params
from tools.lab.bench.workloads import ID_LOW, ID_SPAN, BenchRequest, Workload

_BEAMS = 4
_PROMPT, _OUTPUT = 128, 64  # tokens
_WARM_UP = 4  # tokens


def measure_beam_search(options: dict[str, Any], *, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one record. options: of the engine. Errors: those of LLM; ImportError without torch and transformers."""
    path = resolve_model(options.get("model"))
    dtype, threads = options.get("dtype") or "bfloat16", options.get("threads") or usable_cpus()
    theirs = _transformers_search(path, dtype, threads)
    with LLM(skip_tokenizer_init=True, enable_prefix_caching=False, **options) as llm:
        ways: dict[str, Callable[[list[int], int], list[list[int]]]] = {
            "engine": lambda prompt, count: _search(llm, prompt, count),
            "greedy_x4": lambda prompt, count: _greedy(llm, prompt, count),
            "transformers": theirs,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way(_prompt(0), _WARM_UP)
        equal = 0
        for round_ in range(rounds):
            found = {}
            for name in sorted(ways, reverse=bool(round_ % 2)):
                begin = time.perf_counter()
                found[name] = ways[name](_prompt(1 + round_), _OUTPUT)
                seconds[name].append(time.perf_counter() - begin)
            equal += found["engine"] == found["transformers"]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    yield {
        "engine": NAME,
        "version": VERSION,
        "workload": "beam-search",
        "model": path.name,
        "dtype": dtype,
        "threads": threads,
        "beams": _BEAMS,
        "in_tok": _PROMPT,
        "out_tok": _OUTPUT,
        "rounds": rounds,
        **{f"{name}_s": round(median, 4) for name, median in medians.items()},
        "times_transformers": round(medians["transformers"] / medians["engine"], 2),
        "of_greedy_x4": round(medians["engine"] / medians["greedy_x4"], 3),
        "rounds_with_equal_sequences": equal,
    }


def _prompt(round_: int) -> list[int]:
    ids = [ID_LOW + 7919 * place * place % ID_SPAN for place in range(1, _PROMPT + 1)]
    return Workload("beam-search", [BenchRequest(ids, _OUTPUT)]).shifted(round_).requests[0].prompt


def _search(llm: LLM, prompt: list[int], count: int) -> list[list[int]]:
    (output,) = llm.beam_search([prompt], BeamSearchParams(_BEAMS, count, ignore_eos=True))
    return [one.tokens[len(prompt) :] for one in output.sequences]


def _greedy(llm: LLM, prompt: list[int], count: int) -> list[list[int]]:
    prompts: Any = [{"prompt_token_ids": prompt}] * _BEAMS
    outputs = llm.generate(prompts, request_params(count), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _transformers_search(path: Path, dtype: str, threads: int) -> Callable[[list[int], int], list[list[int]]]:
    """Return a function of (prompt, count) that searches with transformers. Weights of a GGUF file become dense."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    files: tuple[Path, dict[str, Any]] = (path, {})
    if path.is_file():
        dense = transformers.GgufConfig(dequantize=True)  # otherwise float32 is its only fast type
        files = path.parent, {"gguf_file": path.name, "quantization_config": dense}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(files[0], dtype=getattr(torch, dtype), **files[1])
    model.eval()
    model.generation_config.eos_token_id = None

    def search(prompt: list[int], count: int) -> list[list[int]]:
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=_BEAMS,
                num_return_sequences=_BEAMS,
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
            )
        sequences: list[list[int]] = found[:, len(prompt) :].tolist()
        return sequences

    return search
