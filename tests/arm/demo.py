"""Prints what the demo model says, as JSON: greedy tokens and their log probabilities, of one variant and dtype.

usage: python demo.py VARIANT DTYPE WAY TOKENS [QUANTIZATION]

WAY is `embedded`, or `socket`: then another process serves the engine. Only engine_core is imported, so it runs with an
installed wheel too.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_core import LLM, SamplingParams

PROMPT = "The three laws of robotics are"
_START_S = 1800  # a busy machine emulates slowly
_PATIENCE = {"start-timeout": _START_S, "hang-timeout": _START_S, "client-lease-ms": 1000 * _START_S}


def said(llm: LLM, num_tokens: int) -> dict[str, Any]:
    """Return the tokens, and the numbers that show every bit of their log probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, logprobs=2)
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output.logprobs is not None
    chosen = [places[token].logprob for token, places in zip(output.token_ids, output.logprobs, strict=True)]
    return {"tokens": list(output.token_ids), "logprobs": [value.hex() for value in chosen]}


def embedded(options: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return what an engine of this process's own says."""
    with LLM(start_timeout=float(_START_S), **options) as llm:
        return said(llm, num_tokens)


def over_the_socket(options: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return what a client of a served engine gets."""
    with tempfile.TemporaryDirectory(prefix="ec-") as folder:
        address = f"ipc://{folder}/engine"
        named = {**_PATIENCE, **{name.replace("_", "-"): value for name, value in options.items()}}
        flags = [part for name, value in named.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-P", "-m", "engine_core", "serve", "--listen", address, *flags]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                end = time.monotonic() + _START_S
                while not Path(folder, "engine").exists() and server.poll() is None and time.monotonic() < end:
                    time.sleep(0.1)
                with LLM(connect=address, connect_timeout=float(_START_S)) as llm:
                    return said(llm, num_tokens)
            finally:
                server.terminate()


def main(variant: str, dtype: str, way: str, num_tokens: str, quantization: str = "auto") -> None:
    """Print the JSON."""
    options = {
        "cpu_kernels": variant,
        "dtype": dtype,
        "quantization": quantization,
        "threads": 1,
        "max_model_len": 128,
    }
    print(json.dumps({"embedded": embedded, "socket": over_the_socket}[way](options, int(num_tokens))))


if __name__ == "__main__":
    main(*sys.argv[1:])
