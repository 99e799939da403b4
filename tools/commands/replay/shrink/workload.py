"""Workload: requests with their arrival times and the engine's options: all that reproduces a simulated failure."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from core.capture.file import CaptureFile
from core.execution.executor import ModelInfo
from core.executors.fake import FakeExecutor
from ipc.errors import CaptureFileError
from ipc.options.block_stores import NO_STORE
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tools.commands.replay.rerun import replay_config
from tools.commands.replay.what_if.foreign import read_requests
from tools.commands.replay.what_if.recording import Recorded, read_recording

_NS_PER_MS = 1_000_000
#: Fields of a request's parameters that the scheduler reads, in addition to max_tokens.
_KEPT = ("n", "min_tokens", "ignore_eos", "stop_token_ids")


class Workload(msgspec.Struct, frozen=True):
    """What one simulation runs. requests: in order of arrival."""

    config: ResolvedConfig
    info: ModelInfo
    requests: list[Recorded]


def read_workload(file: CaptureFile) -> Workload:
    """Return a capture's workload, even if another version of the engine wrote it that decides differently.

    Errors: CaptureFileError, OtherModelError.
    """
    left_out: dict[str, Any] = {"speculative_config": None, "client_weights": {}, **NO_STORE}
    config = msgspec.structs.replace(replay_config(file.header), **left_out)
    try:
        requests = read_recording(file).requests
    except CaptureFileError:
        requests = read_requests(file)
    for one in requests:
        if not isinstance(one.message, AddRequest) or one.message.params.use_beam_search:
            raise CaptureFileError(
                f"{file.path}: request {one.message.number} of client {one.client} pools or uses beam search: only "
                "requests that sample tokens can be judged and shrunk"
            )
    if not requests:
        raise CaptureFileError(f"{file.path}: it has no requests")
    return Workload(config, file.header.model, requests)


def of_fixed_length(one: Recorded) -> Recorded:
    """Return the request with as many output tokens as it had, with other ids; an unfinished one is not changed."""
    if not one.ended_ns or one.aborted_ns or one.num_choices > 1:
        return one
    params = SamplingParams(max_tokens=max(1, len(one.tokens[0])), ignore_eos=True)
    return changed(one, params=params, delivered=[])


def changed(one: Recorded, **fields: Any) -> Recorded:
    """Return the request with other fields of its message."""
    return msgspec.structs.replace(one, message=msgspec.structs.replace(one.message, **fields))


def params_of(one: Recorded) -> SamplingParams:
    """Return the parameters of a request that samples tokens."""
    assert isinstance(one.message, AddRequest), f"request {one.message.number} pools"
    return one.message.params


def prompt_of(one: Recorded) -> list[int]:
    """Return the tokens of the prompt."""
    tokens: list[int] = np.frombuffer(one.message.prompt_token_ids, "<i4").tolist()
    return tokens


def packed(tokens: Sequence[int]) -> bytes:
    """Return tokens as a column of a message."""
    return np.array(tokens, "<i4").tobytes()


def make_workload(options: dict[str, Any], model: dict[str, Any], requests: list[dict[str, Any]]) -> Workload:
    """Return the workload of a test that `replay shrink` wrote: see tools/commands/replay/shrink/written.py."""
    config = ResolvedConfig(**options)
    info = msgspec.structs.replace(FakeExecutor(config).info, **model)
    return Workload(config, info, [_request(**one) for one in requests])


def _request(
    client: int,
    number: int,
    at_ms: float,
    prompt: list[int],
    max_tokens: int | None,
    abort_after_ms: float = 0.0,
    abort_after_tokens: int = 0,
    **others: Any,
) -> Recorded:
    params = {name: others.pop(name) for name in _KEPT if name in others}
    message = AddRequest(number, packed(prompt), SamplingParams(max_tokens=max_tokens, **params), seed=0, **others)
    received_ns = round(at_ms * _NS_PER_MS)
    aborted_ns = received_ns + round(abort_after_ms * _NS_PER_MS) if abort_after_ms else 0
    times = [aborted_ns] * abort_after_tokens
    return Recorded(client, message, received_ns, [[] for _ in range(message.params.n)], times, aborted_ns=aborted_ns)


def literal(workload: Workload) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return the arguments of make_workload() that make this workload."""
    usual = EngineConfig()
    options = {
        name: value
        for name, value in msgspec.structs.asdict(workload.config).items()
        if value != getattr(usual, name) and not name.startswith(("capture", "flight", "executor_options"))
    }
    options |= {"executor": "fake", "model": None}
    info = workload.info
    model = {"vocab_size": info.vocab_size, "max_model_len": info.max_model_len, "eos_token_ids": info.eos_token_ids}
    return options, model, [_literal(one) for one in workload.requests]


def _literal(one: Recorded) -> dict[str, Any]:
    message = one.message
    found: dict[str, Any] = {
        "client": one.client,
        "number": message.number,
        "at_ms": one.received_ns / _NS_PER_MS,
        "prompt": prompt_of(one),
        "max_tokens": params_of(one).max_tokens,
    }
    usual = SamplingParams()
    found |= {name: value for name in _KEPT if (value := getattr(params_of(one), name)) != getattr(usual, name)}
    plain = AddRequest(0, b"", usual, seed=0)
    names = ("priority", "cache_salt", "tenant", "deadline_ms", "delivered")
    found |= {name: value for name in names if (value := getattr(message, name)) != getattr(plain, name)}
    if one.aborted_ns:
        found["abort_after_ms"] = (one.aborted_ns - one.received_ns) / _NS_PER_MS
        found["abort_after_tokens"] = len(one.token_times)
    return found
