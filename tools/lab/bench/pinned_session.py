"""A session of 11,000 tokens while 5,000 requests of others run: the share of it that is found, and the first token.

The KV cache has room for about two such sessions. Each turn asks the session's prompt and some new tokens for one
token, while nothing else runs, after a part of the others has ended. The prompts of each part take more blocks than the
cache has, so without a pin no turn finds the session. Before that there are as many turns, each after as many requests
that all have one prompt. These evict nothing, and the turn finds the session with or without a pin. So both kinds of
turns follow the same work of others, which leaves the CPU's caches cold and processes asleep, and differ only in what
the KV cache has been through. Once the session is pinned, once it is not, each in an engine of its own. A turn's time
includes the way to the engine and back.

Without a model of the caller's, the model is one layer of the demo model's width, with made-up weights. The prompts of
others have three million tokens in each case, which would take an hour with all layers, and neither what is found nor
how times compare depends on their number.
"""

import math
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from ipc.version import NAME, VERSION
from ipc.wire.pin_messages import Pin
from tools.commands.replay.latency import percentile
from tools.lab.bench.large_model import Shape, write_large_model
from tools.lab.bench.workloads import ID_LOW, ID_SPAN

FOREIGN_REQUESTS = 5000
TURNS = 100  # before, and after: the 99th percentile of fewer is the largest of all
_MAX_MODEL_LEN = 11_264
SHAPE = Shape(
    layers=1, hidden=576, middle=1536, heads=9, kv_heads=3, head_dim=64, tokens=49_152, context=_MAX_MODEL_LEN
)
_ROOM = 264  # tokens of the context that are not the session's
_TURN_TOKENS = 32
_FOREIGN_SHARE = 1.25  # of the cache's blocks: the prompts of others between two turns
_SPARE_BLOCKS = 64
_BLOCK_SIZE = 16
_TTL_MS = 24 * 3600 * 1000
_ONE = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


def measure_pinned_session(options: dict[str, Any], *, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each case and round. options: of the engine. Errors: those of LLM."""
    length = options.get("max_model_len") or _MAX_MODEL_LEN
    sizes: dict[str, Any] = {"block_size": _BLOCK_SIZE, "max_model_len": length, "max_num_seqs": 16}
    num_blocks = 2 * length // _BLOCK_SIZE + _SPARE_BLOCKS
    foreign = math.ceil(_FOREIGN_SHARE * num_blocks * TURNS / FOREIGN_REQUESTS) * _BLOCK_SIZE
    sizes |= {"num_blocks_override": num_blocks, "max_tenant_pinned_share": 0.5}
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
        if options.get("model") is None and options.get("executor") is None:
            sizes["model"] = str(Path(folder, "made-up.gguf"))
            write_large_model(Path(sizes["model"]), SHAPE)
        for round_ in range(rounds):
            for case in ("pinned", "unpinned"):
                with LLM(**{**sizes, **options, "skip_tokenizer_init": True}) as llm:
                    yield _measure(llm, length - _ROOM, foreign, case, round_) | {"dtype": options.get("dtype")}


def _measure(llm: LLM, num_tokens: int, num_foreign: int, case: str, round_: int) -> dict[str, Any]:
    session = [ID_LOW + (round_ + number * 7) % ID_SPAN for number in range(num_tokens)]
    pins = [Pin("session", _TTL_MS, num_tokens)] if case == "pinned" else []
    _turn(llm, session, 0, pins)
    before, after, asked_of = [], [], FOREIGN_REQUESTS // TURNS
    for turn in range(TURNS):
        _ask_others(llm, [0] * asked_of, num_foreign)
        before.append(_turn(llm, session, 1 + turn, pins))
    for turn in range(TURNS):
        _ask_others(llm, range(turn * asked_of, (turn + 1) * asked_of), num_foreign)
        after.append(_turn(llm, session, 1 + TURNS + turn, pins))
    whole = num_tokens // _BLOCK_SIZE * _BLOCK_SIZE
    times = {name: [seconds for seconds, _ in turns] for name, turns in (("before", before), ("after", after))}
    ratio = percentile(times["after"], 0.99) / percentile(times["before"], 0.99)
    return {
        "engine": NAME,
        "version": VERSION,
        "workload": "pinned-session",
        "case": case,
        "round": round_,
        "session_tokens": num_tokens,
        "foreign_requests": asked_of * TURNS,
        "foreign_tokens": num_foreign,
        "turns": TURNS,
        "hit_share": round(sum(found for _, found in after) / (whole * len(after)), 4),
        "num_pins_yielded": llm.statistics().num_pins_yielded,
        **{f"ttft_p50_ms_{name}": round(percentile(times[name], 0.5) * 1000, 2) for name in times},
        **{f"ttft_p99_ms_{name}": round(percentile(times[name], 0.99) * 1000, 2) for name in times},
        "ttft_p99_after_by_before": round(ratio, 3),
    }


def _turn(llm: LLM, session: list[int], number: int, pins: list[Pin]) -> tuple[float, int]:
    """Return (seconds, cached tokens of the session) of a request for one token."""
    own = [ID_LOW + (number * 131 + place) % ID_SPAN for place in range(_TURN_TOKENS)]
    begin = time.perf_counter()
    (output,) = llm.generate({"prompt_token_ids": [*session, *own]}, _ONE, use_tqdm=False, pins=pins)
    return time.perf_counter() - begin, min(output.num_cached_tokens or 0, len(session) // _BLOCK_SIZE * _BLOCK_SIZE)


def _ask_others(llm: LLM, numbers: Iterable[int], length: int) -> None:
    """Run requests of another tenant, with prompts of these numbers."""
    prompts: Any = [{"prompt_token_ids": _foreign(number, length)} for number in numbers]
    llm.generate(prompts, _ONE, use_tqdm=False, tenant="others")


def _foreign(number: int, length: int) -> list[int]:
    return [ID_LOW + (number * 17 + place * place) % ID_SPAN for place in range(length)]
