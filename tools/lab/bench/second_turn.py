"""Time to the first token of a conversation's second turn, compared with that of its whole prompt.

The first turn has 20,000 tokens by default. The second one has its tokens, those of its answer, and new ones. Then a
prompt comes that leaves the first one shortly before its end: a partial prefix at its second sighting. Last, the engine
is killed and another one with its folder gets a third turn. Each case has new tokens in each round. A time includes the
way to the engine and back.
"""

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from tools.lab.bench.workloads import ID_LOW, ID_SPAN

_CASES = ("cold", "second turn", "partial prefix", "from files")
_FIRST_TOKENS = 20_000
_ANSWER_TOKENS = 64
_NEW_TOKENS = 64
_ROOM = 1024  # of the context, for answers and further turns
_BLOCK_SIZE = 16
_HOST_BYTES = 1 << 30
_STORED_S = 120.0  # longest wait until all blocks are in files
_SETTLED_S = 0.5  # without a new file: then they are


def measure_second_turn(options: dict[str, Any], *, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each case. options: of the engine; max_model_len decides the length. Errors: those of LLM."""
    length = options.get("max_model_len") or _FIRST_TOKENS + _ROOM
    sizes: dict[str, Any] = {"max_model_len": length, "max_num_seqs": 2, "block_size": _BLOCK_SIZE}
    sizes |= {"num_blocks_override": 3 * length // _BLOCK_SIZE, "kv_host_bytes": _HOST_BYTES}
    sizes |= {**options, "skip_tokenizer_init": True}
    times: dict[str, list[float]] = {case: [] for case in _CASES}
    computed: dict[str, int] = {}
    for round_ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
            for case, (seconds, num_computed) in _round(sizes, folder, length - _ROOM, round_).items():
                times[case].append(seconds)
                computed[case] = num_computed
    cold = statistics.median(times["cold"])
    for case in _CASES:
        yield {
            "engine": NAME,
            "version": VERSION,
            "workload": "second-turn",
            "case": case,
            "first_tokens": length - _ROOM,
            "computed_tokens": computed[case],
            "ttft_ms": round(statistics.median(times[case]) * 1000, 2),
            "of_cold": round(statistics.median(times[case]) / cold, 4),
            "dtype": options.get("dtype"),
        }


def _round(sizes: dict[str, Any], folder: str, count: int, round_: int) -> dict[str, tuple[float, int]]:
    """Return (seconds, computed tokens) of each case."""
    first = [ID_LOW + (round_ * 37 + place * 7 + place // 50) % ID_SPAN for place in range(count)]
    found = {}
    with LLM(**sizes, kv_dir=f"{folder}/kv") as llm:
        found["cold"], _ = _ask(llm, first, 1)
        _, answer = _ask(llm, first, _ANSWER_TOKENS)
        second = [*first, *answer, *_new(round_)]
        found["second turn"], answer = _ask(llm, second, 1)
        leaves = count - 3 * _NEW_TOKENS  # neither at a block's end nor at a place that was guessed
        found["partial prefix"], _ = _ask(llm, [*first[: leaves - 5], *_new(round_ + 1)], 1)
        _wait_until_stored(llm)
        os.kill(llm.client.welcome.pid, signal.SIGKILL)
    with LLM(**sizes, kv_dir=f"{folder}/kv") as llm:
        _ask(llm, _new(round_ + 3), 1)  # the first step of an engine takes longer
        found["from files"], _ = _ask(llm, [*second, *answer, *_new(round_ + 2)], 1)
    return found


def _ask(llm: LLM, prompt: list[int], max_tokens: int) -> tuple[tuple[float, int], list[int]]:
    """Return (seconds, computed tokens of the prompt), and the answer."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return (seconds, len(prompt) - (output.num_cached_tokens or 0)), list(output.outputs[0].token_ids)


def _new(number: int) -> list[int]:
    return [ID_LOW + (number * 131 + place * place) % ID_SPAN for place in range(_NEW_TOKENS)]


def _wait_until_stored(llm: LLM) -> None:
    """Wait until no more files are written. Errors: AssertionError if that takes too long."""
    end, seen, since = time.monotonic() + _STORED_S, -1, time.monotonic()
    while seen < 0 or time.monotonic() - since < _SETTLED_S:
        assert time.monotonic() < end, "blocks are still being written"
        if (stored := llm.statistics().num_stored_blocks) != seen:
            seen, since = stored, time.monotonic()
        time.sleep(0.02)
