"""Fixed workloads: token-id prompts and fixed output lengths, greedy, EOS ignored, all submitted at once."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from ipc.errors import ConfigError

#: Plain token ids of common vocabularies lie in [ID_LOW, ID_LOW + ID_SPAN).
ID_LOW = 20
ID_SPAN = 48_900
HOST_ID_SPAN = 1_900  # such ids are in every vocabulary, even in the tiny model's 2,048
_STRIDE = 7919  # a prime: each round shifts the ids by another amount


class BenchRequest(msgspec.Struct, frozen=True):
    """A prompt of token ids, and how many tokens to generate."""

    prompt: list[int]
    max_tokens: int


class Workload(msgspec.Struct, frozen=True):
    """Requests that are submitted together. id_span: token ids lie in [ID_LOW, ID_LOW + id_span)."""

    name: str
    requests: list[BenchRequest]
    id_span: int = ID_SPAN

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of prompt tokens of all requests."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens of all requests."""
        return sum(request.max_tokens for request in self.requests)

    def shifted(self, round_: int) -> "Workload":
        """Return the same shape with other token ids, so that the prefix cache has no hits across rounds."""
        shift = _STRIDE * round_

        def move(prompt: list[int]) -> list[int]:
            return [ID_LOW + (token - ID_LOW + shift) % self.id_span for token in prompt]

        requests = [BenchRequest(move(request.prompt), request.max_tokens) for request in self.requests]
        return Workload(self.name, requests, self.id_span)


def make_workload(name: str) -> Workload:
    """Return one of WORKLOADS. Errors: ConfigError for another name."""
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; known are {', '.join(WORKLOADS)}")
    seed, make = WORKLOADS[name]
    requests = [BenchRequest(prompt, max_tokens) for prompt, max_tokens in make(random.Random(seed))]
    return Workload(name, requests, HOST_ID_SPAN if name == "host256" else ID_SPAN)


def read_workload(path: Path) -> Workload:
    """Read a file {"name": ..., "requests": [{"prompt": [ids], "max_tokens": n}, ...]}. Errors: ConfigError."""
    try:
        workload = msgspec.json.decode(path.read_bytes(), type=Workload)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f'--workload {path}: {error}; expected {{"name": ..., "requests": [{{"prompt": [ids], "max_tokens": n}}]}}'
        ) from error
    if not workload.requests or not all(request.prompt and request.max_tokens > 0 for request in workload.requests):
        raise ConfigError(f"--workload {path}: needs requests, each with a prompt and max_tokens above 0")
    return workload


def warm_up_workload(id_span: int = ID_SPAN) -> Workload:
    """Return a small mixed load that runs before anything is timed; its first prompt gives the first token."""
    prompts = [[ID_LOW + ((77 + k) * 104729 + i * 7907) % id_span for i in range(40 + 61 * k)] for k in range(8)]
    return Workload("warm", [BenchRequest(prompt, 8 + 2 * k) for k, prompt in enumerate(prompts)], id_span)


def _ids(rng: random.Random, count: int, end: int = ID_LOW + ID_SPAN) -> list[int]:
    return [rng.randrange(ID_LOW, end) for _ in range(count)]


_Prompts = list[tuple[list[int], int]]  # (prompt, max_tokens)


def _lat1(rng: random.Random) -> _Prompts:
    return [(_ids(rng, 128), 128)]


def _batch8(rng: random.Random) -> _Prompts:
    return [(_ids(rng, 128), 128) for _ in range(8)]


def _batch32(rng: random.Random) -> _Prompts:
    return [(_ids(rng, rng.randint(32, 512)), rng.randint(16, 128)) for _ in range(32)]


def _prefix(rng: random.Random) -> _Prompts:
    shared = _ids(rng, 512)
    return [(shared + _ids(rng, 32), 32) for _ in range(16)]


def _long(rng: random.Random) -> _Prompts:
    return [(_ids(rng, 2000), 16)]


def _host256(rng: random.Random) -> _Prompts:
    """Return the requests for the tiny model: almost only the engine's own overhead. Ids up to 1,999."""
    return [(_ids(rng, 32, 2000), 128) for _ in range(256)]


#: Name -> (seed, maker).
WORKLOADS: dict[str, tuple[int, Callable[[random.Random], _Prompts]]] = {
    "lat1": (1, _lat1),
    "batch8": (2, _batch8),
    "batch32": (3, _batch32),
    "prefix": (4, _prefix),
    "long": (5, _long),
    "host256": (7, _host256),
}
