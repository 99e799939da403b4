"""The parts of an engine process's start, one by one, in a fresh process that does nothing else.

The engine itself does some parts at the same time (it builds kernels while it imports torch), so the sum is more than
its start takes. CPU seconds are of all threads: they show the cost even if other work has stretched the wall time.

`python -m tools.lab.bench.startup_parts` is that process: EngineConfig as JSON in, parts as JSON out.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ipc.errors import EngineCoreError, EngineStartError
from ipc.files.model_files import read_tokenizer_files, resolve_model
from ipc.options.config import EngineConfig
from tools.lab.bench.quiet import seconds_since_process_start

_BLOCK_SIZE = 16


class Part(msgspec.Struct, frozen=True):
    """The wall time and the CPU time of one part, in seconds."""

    wall_s: float
    cpu_s: float


Parts = dict[str, Part]


def has_parts(config: EngineConfig) -> bool:
    """Return whether the engine of this config loads a model with this project's own code."""
    return config.executor == "local" and config.model_impl != "transformers"


def measure_parts(config: EngineConfig, environment: dict[str, str]) -> Parts:
    """Measure in a fresh process. Errors: EngineStartError with the output of the process."""
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=msgspec.json.encode(config), capture_output=True, check=False, env=environment)
    if done.returncode:
        raise EngineStartError(done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Parts)


@contextmanager
def _timed(parts: Parts, name: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    parts[name] = Part(round(time.perf_counter() - wall, 3), round(time.process_time() - cpu, 3))


def start_by_parts(config: EngineConfig) -> Parts:
    """Do the parts of a start in this process and return their times. Errors: those of a start."""
    parts: Parts = {"python": Part(round(seconds_since_process_start(), 3), round(time.process_time(), 3))}
    path = resolve_model(config.model)
    with _timed(parts, "tokenizer"):
        read_tokenizer_files(path, optional=True, mmproj=config.mmproj)
    with _timed(parts, "import ours"):
        from core.device import start_cpu_kernels
        from core.model_files.load_format import open_weights
        from core.model_files.model_config import read_model_config
        from core.models.llama import Llama
        from core.models.operations.stored_matrix import StoredMatrix
        from kernels.cpu.library_file import find_library
        from kernels.elements import ELEMENT_TYPES
    if config.cpu_kernels != "torch":
        with _timed(parts, "find or build kernels"):
            find_library()
    library = start_cpu_kernels(config)
    dtype = ELEMENT_TYPES["float32" if config.dtype == "float32" else "bfloat16"]
    with _timed(parts, "map"):
        model_config = read_model_config(path, config.mmproj)
        opened = open_weights(config.load_format, path, model_config, dtype, library)
    with _timed(parts, "dequantize"):
        weights = [(name, w.dense(dtype) if isinstance(w, StoredMatrix) else w) for name, w in opened.tensors]
    with _timed(parts, "pack"):
        model = Llama(model_config, weights, dtype, config.numerics, library=library)
    with _timed(parts, "kv cache"):
        model.allocate_cache(256, _BLOCK_SIZE)
    return parts


if __name__ == "__main__":
    try:
        measured = start_by_parts(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig))
    except EngineCoreError as error:
        sys.exit(str(error))
    print(msgspec.json.encode(measured).decode())
