"""Wrong checkpoints with right checksums, and a process that restores and runs them under an audit hook.

`python -m tests.core.capture.hostile_checkpoints SEED COUNT` ends with status 0 if each of COUNT mutations became a
state that runs or a CaptureFileError, and Python reported no event meanwhile: no import, open, exec, compile, socket or
process.
"""

import contextlib
import random
import sys
import zlib
from typing import Any

import msgspec
import numpy as np

from core.capture.bounds import bounded_memory, untrusted_file
from core.capture.recorded_executor import RecordedExecutor
from core.capture.restore import restore
from core.capture.snapshot import REFERENCE, Snapshot
from core.capture.state_classes import ENUMS, METHODS, NAMED, OBJECTS, STRUCTS
from core.engine import EngineCore
from core.execution.executor import Executor
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.executors.by_name import load_executor
from ipc.errors import CaptureFileError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.captures import CONFIG

_NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 15, -(1 << 31), 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_WORDS = ("", "os:system", "core.kv...tools.cli:main", "__class__", "ctypes", "\0", "<f8", "|O", "|V8", "<U9", "<i4")


def reference(number: int) -> msgspec.msgpack.Ext:
    """Return a value that stands for a node."""
    return msgspec.msgpack.Ext(REFERENCE, number.to_bytes(4, "little"))


def pack(nodes: list[Any], root: Any) -> bytes:
    """Return a checkpoint of these nodes."""
    batches = [nodes[first : first + 32] for first in range(0, len(nodes), 32)]
    return zlib.compress(msgspec.msgpack.encode([batches, root]), 1)


def unpack(data: bytes) -> tuple[list[Any], Any]:
    """Return the nodes of a checkpoint, and its root."""
    batches, root = msgspec.msgpack.decode(zlib.decompress(data))
    return [node for batch in batches for node in batch], root


def rich_engine(*, searches: bool = True) -> EngineCore:
    """Return an engine with running, waiting and preempted requests, several choices and, if asked, a beam search."""
    engine = EngineCore(CONFIG, _executor())
    params = [SamplingParams(max_tokens=20), SamplingParams(n=2, max_tokens=9)]
    params.append(SamplingParams(use_beam_search=searches, n=2, temperature=0 if searches else 1, max_tokens=9))
    for number in range(9):
        prompt = np.arange(5, 12 + 3 * number, dtype="<i4").tobytes()
        engine.step([(number % 2, AddRequest(number, prompt, params[number % 3], seed=number))], number + 1)
    return engine


def snapshot_of(*, searches: bool = True) -> bytes:
    """Return a sound checkpoint."""
    return Snapshot(rich_engine(searches=searches).state()).encode()


def mutate(nodes: list[Any], root: Any, rng: random.Random) -> bytes:
    """Return a checkpoint with one to three changes: of values, classes, arrays, views, references or bytes."""
    nodes = list(nodes)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(nodes))
        match rng.randrange(8):
            case 0:
                nodes[place] = nodes[rng.randrange(len(nodes))]
            case 1:
                root = rng.choice((reference(place), ["list", 1], None, reference(len(nodes))))
            case 2:
                nodes[place] = [*nodes[place][:1], *rng.choices([_strange(nodes, rng) for _ in range(4)], k=5)]
            case _:
                nodes[place] = _with_change(nodes[place], nodes, rng)
    data = pack(nodes, root)
    if rng.random() < 0.1:
        raw = bytearray(zlib.decompress(data))
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return zlib.compress(bytes(raw), 1)
    return data


def _with_change(value: list[Any], nodes: list[Any], rng: random.Random) -> list[Any]:
    """Return a node or a value with one part, or one part of a part, changed, left out, doubled or swapped."""
    changed = list(value)
    if not changed:
        return changed
    place = rng.randrange(len(changed))
    match rng.randrange(8):
        case 0:
            del changed[place]
        case 1:
            changed.insert(place, changed[rng.randrange(len(changed))])
        case 2:
            other = rng.randrange(len(changed))
            changed[place], changed[other] = changed[other], changed[place]
        case 3 | 4 | 5:
            changed[place] = _like(changed[place], nodes, rng)
        case _ if type(changed[place]) is list:
            changed[place] = _with_change(changed[place], nodes, rng)
        case _:
            changed[place] = _strange(nodes, rng)
    return changed


def _like(value: Any, nodes: list[Any], rng: random.Random) -> Any:
    """Return another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() if abs(value) < 1 << 62:
            return rng.choice((value + 1, value - 1, -value, rng.choice(_NUMBERS), rng.randrange(64)))
        case bytes() if value:
            place = rng.randrange(len(value))
            return value[:place] + bytes((rng.randrange(256),)) + value[place + 1 :]
        case msgspec.msgpack.Ext():
            number = int.from_bytes(value.data, "little")
            kind = nodes[number % len(nodes)][:1]
            return reference(rng.choice([place for place, node in enumerate(nodes) if node[:1] == kind]))
        case list():
            return _with_change(value, nodes, rng)
        case _:
            return value


def _strange(nodes: list[Any], rng: random.Random) -> Any:
    """Return a value of some kind."""
    classes = [*OBJECTS, *STRUCTS, *NAMED, *ENUMS]
    kinds: list[Any] = [
        rng.choice(_NUMBERS),
        rng.choice(_WORDS),
        rng.choice((None, True, 0.5, float("nan"), b"", b"\0" * 8)),
        reference(rng.randrange(len(nodes))),
        reference(rng.choice(_NUMBERS[:6]) % (1 << 32)),
        rng.choice(classes),
        ["method", reference(rng.randrange(len(nodes))), rng.choice((*METHODS, "__init__", "set_parts", "mro"))],
        ["enum", rng.choice(classes), rng.choice(_NUMBERS)],
        ["tuple", *rng.choices(_NUMBERS, k=rng.randrange(4))],
        ["array", rng.choice(("<i8", "<i4", "|b1", "|O", "<f4")), bytes(8 * rng.randrange(4))],
        ["scalar", rng.choice(("<i8", "<u8", "|O")), bytes(8)],
        [
            "message",
            rng.choice(("ipc.params.sampling_params:SamplingParams", "ipc.options.config:EngineConfig")),
            b"\x80",
        ],
    ]
    return rng.choice(kinds)


class _OneToken(RecordedExecutor):
    """An executor that has the same token for every row."""

    def tokens_of(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(plan.step, np.full(len(plan.rows), 5, np.int32))


def run_state(data: bytes) -> None:
    """Restore a checkpoint and run some steps of it. Errors: CaptureFileError."""
    with untrusted_file("crafted"):
        engine = EngineCore(CONFIG, _OneToken(_executor().info))
        engine.take_over(restore(data))
        for step in range(4):
            engine.step([], 10**12 + step)


def _executor() -> Executor:
    executor = load_executor(CONFIG)
    executor.initialize_cache(CONFIG)
    return executor


def main(seed: int, count: int) -> tuple[int, int]:
    """Run so many mutations; return how many became no state, and how many could not run."""
    data = snapshot_of()
    nodes, root = unpack(data)
    run_state(data)  # what is imported or compiled once is ready now
    rng, events, is_watched = random.Random(seed), list[str](), False
    num_refused = num_failed = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watched and event != "builtins.id":
            events.append(f"{event} {arguments!r:.80}")

    sys.addaudithook(hook)
    with bounded_memory("crafted"):
        for number in range(count):
            crafted = mutate(nodes, root, rng)
            is_watched = True
            try:
                restore(crafted)
            except CaptureFileError:
                num_refused += 1
            else:
                with contextlib.suppress(CaptureFileError):
                    num_failed += 1
                    run_state(crafted)
                    num_failed -= 1
            finally:
                is_watched = False
            assert not events, (seed, number, events[:5])
    return num_refused, num_failed


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2])))
