"""The workers of one model, placed by Ray on two nodes: `python -m tests.ray_cluster.placed_workers CASE`.

It runs on the first node. Streams are compared with those of one process, bit by bit, while workers, actors and the
engine are killed. Lines on standard output say what was seen.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frontend.client.client import EngineClient
from frontend.client.received_logprobs import ReceivedLogprobs
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from frontend.engine.supervised_engine import SupervisedEngine
from ipc.options.given_options import config_from_options
from ipc.params.sampling_params import SamplingParams
from tests.core.workers.part_answers import MODEL

SIZES: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 512, "block_size": 8}
SIZES |= {"num_blocks_override": 600, "flight_recorder_bytes": 0, "enable_prefix_caching": False}
SIZES |= {"load_format": "dummy"}
NUM_STREAMS, NUM_TOKENS = 6, 300
PATIENCE_S = 180.0
Stream = tuple[tuple[int, ...], bytes]
#: Case -> options: ranks, and stages, of which each is on a node of its own; and both ranks on one node.
CASES: dict[str, dict[str, Any]] = {
    "stages": {"pipeline_parallel_size": 2, "nnodes": 2},
    "ranks": {"tensor_parallel_size": 2, "nnodes": 2},
    "one node": {"tensor_parallel_size": 2},
}


def streams(client: EngineClient, disturb: Callable[[], None] | None = None) -> tuple[list[Stream], float]:
    """Run the streams, with disturb() in their middle. Return (tokens and log probabilities of each, longest pause)."""
    numbers = []
    for which in range(NUM_STREAMS):
        params = SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8 if which % 2 else 0.0, logprobs=2
        )
        numbers.append(client.submit([which + 5, *range(3, 40)], params, seed=which))
    end, last, pause, total, is_due = time.monotonic() + PATIENCE_S, time.monotonic(), 0.0, 0, disturb is not None
    while not all(client.read(number).finish for number in numbers):
        now = time.monotonic()
        assert now < end, "the streams do not end"
        found = [client.read(number) for number in numbers]
        assert not any(one.error for one in found), [one.error for one in found]
        if (count := sum(len(one.token_ids) for one in found)) > total:
            pause, total, last = max(pause, now - last), count, now
        if is_due and disturb is not None and total > NUM_STREAMS * 20:
            is_due = False
            disturb()
        time.sleep(0.001)
    assert not is_due, "the streams ended before the disturbance"
    results = [client.read(number) for number in numbers]
    bits = [(tuple(one.token_ids.tolist()), _bits(one.logprobs)) for one in results]
    client.discard(numbers)
    return bits, pause


def _bits(logprobs: ReceivedLogprobs | None) -> bytes:
    assert logprobs is not None
    assert len(logprobs.output) == NUM_TOKENS
    return b"".join(one.token_ids.tobytes() + one.values.tobytes() for one in logprobs.output)


def alone(model: str) -> list[Stream]:
    """The streams of one process."""
    with EngineProcess(config_from_options(model=model, **SIZES)) as process:
        client = EngineClient(ZmqTransport(process.address))
        try:
            return streams(client)[0]
        finally:
            client.close()


def run(model: str, case: str, expected: list[Stream]) -> None:
    """Run one case, with all its disturbances."""
    config = config_from_options(model=model, worker_use_ray=True, **SIZES, **CASES[case])
    begin = time.monotonic()
    process = EngineProcess(config, resume_s=60.0, listen=f"ipc://{model}/{case.replace(' ', '-')}")
    engine = SupervisedEngine(process)
    try:
        engine.start()
        engine.wait_ready()
        placed = process.ray_workers
        assert placed is not None
        num_nodes = len(set(placed.nodes()))
        assert num_nodes == CASES[case].get("nnodes", 1), placed.nodes()
        print(f"{case}: ready after {time.monotonic() - begin:.1f} s, on {num_nodes} nodes of Ray", flush=True)
        client = EngineClient(ZmqTransport(process.address, locate=engine.locate, grace=PATIENCE_S))

        def kill(which: int) -> None:
            os.kill(placed.pids()[-1][which], signal.SIGKILL)

        disturbances: dict[str, Callable[[], None] | None] = {
            "nothing happens": None,
            "kill -9 of an actor": lambda: kill(0),
            "kill -9 of engine-core worker": lambda: kill(1),
            "kill -9 of the engine": lambda: os.kill(process.pid, signal.SIGKILL),
        }
        if case == "stages" and os.environ.get(CUT):
            disturbances["the wire is cut for 6 s"] = lambda: Path(os.environ[CUT]).touch()
        for name, disturb in disturbances.items():
            found, pause = streams(client, disturb)
            assert found == expected, f"{case}, {name}: other bits"
            print(f"{case}: {NUM_STREAMS} streams exact while {name}; pause {pause:.1f} s", flush=True)
        client.close()
    finally:
        engine.close()


#: Environment variable: a file that is made when the wire between the nodes is to be cut.
CUT = "ENGINE_CORE_TEST_CUT"


def main() -> int:
    """Run the cases that are named, or all."""
    with tempfile.TemporaryDirectory(prefix="engine-core-ray-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 4}))
        expected = alone(folder)
        for case in sys.argv[1:] or CASES:
            run(folder, case, expected)
    return 0


if __name__ == "__main__":
    sys.exit(main())
