"""Time to the first token of a prompt of 2,000 tokens: computed, from the host's memory, from files, and from a peer.

The KV cache has room for one such request. So a second one evicts the first, which is kept on the host and written to
the folder. The files are in the page cache, because they have just been written. The peer is a second engine on this
machine, which has computed a third prompt. Results are medians over rounds with new prompts, turn about: the time of a
request for one token, including the way to the engine and back.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from frontend.llm import LLM
from ipc.errors import EngineCoreError
from ipc.options.block_stores import make_key_file
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from tools.lab.bench.workloads import ID_LOW, ID_SPAN

_PROMPT_TOKENS = 2000
_BLOCK_SIZE = 16
_HOST_BYTES = 1 << 30
_STORED_S = 30.0  # longest wait until all blocks are in files
_SETTLED_S = 0.5  # without a new file: then they are
_CASES = ("computed", "host", "directory", "peer")


def measure_kv_tiers(options: dict[str, Any], *, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each case. options: of the engine. Errors: those of LLM."""
    sizes: dict[str, Any] = {"max_num_seqs": 1, "kv_host_bytes": _HOST_BYTES, "block_size": _BLOCK_SIZE}
    sizes |= {"max_model_len": _PROMPT_TOKENS + _BLOCK_SIZE}
    times: dict[str, list[float]] = {case: [] for case in _CASES}
    cached: dict[str, int] = {}
    sizes |= {**options, "skip_tokenizer_init": True}
    with (
        tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder,
        _key_file(folder) as key,
        LLM(**sizes, kv_listen=f"ipc://{folder}/peer", **key) as peer,
        LLM(**sizes, kv_dir=f"{folder}/kv", kv_peers=f"ipc://{folder}/peer", **key) as llm,
    ):
        for round_ in range(-1, rounds):  # the first warms up
            prompts = [[ID_LOW + (4 * round_ + kind + 8) % ID_SPAN, *_body()] for kind in range(3)]
            before = llm.statistics().num_stored_blocks
            found = {"computed": _first_token(llm, prompts[0])}
            _first_token(llm, prompts[1])  # evicts the first one
            _wait_until_stored(llm, before)
            found["host"] = _first_token(llm, prompts[0])
            llm.reset_prefix_cache()  # the files stay
            found["directory"] = _first_token(llm, prompts[0])
            llm.reset_prefix_cache()
            _first_token(peer, prompts[2])
            found["peer"] = _first_token(llm, prompts[2])
            llm.reset_prefix_cache()
            for case, (seconds, num_cached) in found.items():
                if round_ >= 0:
                    times[case].append(seconds)
                    cached[case] = num_cached
    usual = statistics.median(times["computed"])
    for case in _CASES:
        median = statistics.median(times[case])
        yield {
            "engine": NAME,
            "version": VERSION,
            "workload": "kv-tiers",
            "case": case,
            "dtype": options.get("dtype"),
            "rounds": rounds,
            "prompt_tokens": _PROMPT_TOKENS,
            "cached_tokens": cached[case],
            "ttft_ms": round(median * 1000, 2),
            "ttft_ms_max": round(max(times[case]) * 1000, 2),
            "share_of_computing": round(median / usual, 4),
        }


@contextmanager
def _key_file(folder: str) -> Iterator[dict[str, Any]]:
    """Make a key for block names; yield the option for it."""
    make_key_file(f"{folder}/key")
    yield {"kv_key_file": f"{folder}/key"}


def _body() -> list[int]:
    return [ID_LOW + number * 7 % ID_SPAN for number in range(_PROMPT_TOKENS - 1)]


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Return (seconds, cached tokens) of a request for one token."""
    begin = time.perf_counter()
    (output,) = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False
    )
    return time.perf_counter() - begin, output.num_cached_tokens or 0


def _wait_until_stored(llm: LLM, before: int) -> None:
    """Wait until the prompts' blocks are in files. Errors: EngineCoreError after _STORED_S."""
    end, stored, settled_at = time.monotonic() + _STORED_S, before, time.monotonic() + _SETTLED_S
    while stored == before or time.monotonic() < settled_at:
        if time.monotonic() > end:
            raise EngineCoreError(
                f"after {_STORED_S:.0f} s {stored - before} blocks are in files, and writing continues"
            )
        time.sleep(0.05)
        if (now := llm.statistics().num_stored_blocks) != stored:
            stored, settled_at = now, time.monotonic() + _SETTLED_S
