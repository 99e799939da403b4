"""Compile the kernels of a model's steps for a GPU that is not there, into a folder that is carried to it.

usage: TRITON_INTERPRET=0 TRITON_CACHE_DIR=FOLDER python -m tools.lab.bench.gpu.compile_ahead [MODEL] [--names]

The engine's own executor runs its steps on the CPU, while each launch of a kernel compiles it and computes nothing.
So the kernels have the types, constants and alignments of a GPU's launches, and Triton finds them in FOLDER there: the
names of its files depend on its version, on the compiler and on these. It prints how many kernels were compiled.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from core.executors.cuda import CudaExecutor
from core.models import device_model
from core.models.llama import Llama
from core.process.resolve import resolve
from core.runner.decode_graphs import Drafted
from ipc.options.config import EngineConfig
from kernels.triton import device as triton_device
from kernels.triton.ordered_product import TILES
from kernels.triton.sampling import Kinds, sample_tokens
from kernels.triton.self_test import tile_digests
from tools.lab.bench.gpu.report import count_kernels

CAPABILITY, SHARED_MEMORY = 90, 227 << 10
#: More rows and tokens choose no other kernel.
_ROWS = _TOKENS = 2 * max(most for most in TILES if most < 1 << 32)
_NUM_BLOCKS = 2


def _compile_only(seen: Callable[[str], bool]) -> None:
    """Have each launch compile its kernel. seen: called with its name; False = it is not compiled either."""
    run = JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **options) if seen(self.fn.__name__) else None

    target = GPUTarget("cuda", CAPABILITY, 32)  # what Triton asks its driver to compile a kernel
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda index: 0, get_current_target=lambda: target
        )
    )
    JITFunction.run = compiled
    device, memory = torch.device("cpu"), SHARED_MEMORY
    vars(triton_device).update(find_device=lambda: device, shared_memory=lambda device: memory)
    vars(device_model).update(products_are_ordered=lambda device, dtype: bool(tile_digests(device, dtype)))


def run_steps(model: str | None) -> None:
    """Run steps of each kind: of prompts, of rows that decode, with and without drafts, and of samples."""
    config = EngineConfig(
        model=model,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_TOKENS,
        preemption_mode="swap",
        num_swap_blocks=_NUM_BLOCKS,
        num_blocks_override=_NUM_BLOCKS,
    )
    executor = CudaExecutor(config)
    executor.memory.compile_steps()
    executor.initialize_cache(
        resolve(config, executor.info, lambda *_: _NUM_BLOCKS, total_memory_bytes=1 << 34, num_cpus=1)
    )
    runner, llama = executor.runner, executor.runner.model
    assert isinstance(llama, Llama), type(llama)
    runner.measure_steps()
    for num_rows, num_splits, kind in product((8, *TILES), (1, 4), ("plain", "drafts", "common")):
        size = min(num_rows, _ROWS)
        rows, shared = (torch.full((size,), number, dtype=torch.int32) for number in (-1, 1))
        common = torch.zeros(1, dtype=torch.int32) if kind == "common" and num_splits > 1 else None
        hidden = torch.empty(size, llama.config.hidden_size)
        with torch.inference_mode():
            runner.decode(rows, rows, Drafted(shared, rows) if kind == "drafts" else None, common, num_splits, hidden)
    logits, words = torch.zeros(2, llama.vocab_size), torch.zeros(8, 2, dtype=torch.int32)
    for draws, cuts in ((False, False), (True, False), (True, True)):
        sample_tokens(logits.clone(), words, Kinds(draws, cuts))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, and say how many kernels are new."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model; default: the demo model")
    parser.add_argument("--names", action="store_true", help="only print the names of the kernels, compile none")
    given = parser.parse_args(arguments)
    names = Counter[str]()

    def seen(name: str) -> bool:
        names[name] += 1
        return not given.names

    before = count_kernels()
    _compile_only(seen)
    run_steps(given.model)
    if given.names:
        print(*sorted(names), sep="\n")
    else:
        print(f"Triton {triton.__version__}, sm_{CAPABILITY}: {count_kernels() - before} kernels compiled")


if __name__ == "__main__":
    main()
