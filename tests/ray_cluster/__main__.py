"""Engines, and the workers of one engine, as actors of a real Ray cluster on this machine: `make ray`.

A replica's actor is killed with SIGKILL under 64 streams: all of them go on exactly, Ray starts the actor again, and
the router, or the client that routes, learns of its new address. Before that, the workers of one model run on two
nodes. Prints what was seen, with its times.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.fleet.transport import FleetTransport
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.ray_cluster.placed_workers import CUT
from tests.ray_cluster.two_nodes import own_token, two_nodes
from tools.commands.ray_fleet.fleet import Change, RayFleet, deploy

VOCAB, NUM_STREAMS, NUM_TOKENS = 1000, 64, 300
ENGINE: dict[str, Any] = {
    "executor": "fake",
    "executor_options": fake_options(vocab_size=VOCAB, step_us=5000, max_model_len=2048),
    "max_num_seqs": 64,
    "num_blocks_override": 2000,
    "flight_recorder_bytes": 0,
}
PATIENCE_S, BACK_S = 120.0, 15.0


def wait_until(is_over: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> float:
    """Wait; return for how many seconds."""
    begin = time.monotonic()
    while not is_over():
        assert time.monotonic() < begin + seconds, f"{what}: not within {seconds:g} s"
        time.sleep(0.01)
    return time.monotonic() - begin


def open_replicas(client: EngineClient) -> list[str]:
    """Return the addresses of the replicas that take requests."""
    return [one.address for one in client.replicas().replicas if one.state == "open"]


def check_streams(client: EngineClient, kill: Callable[[], Any]) -> float:
    """Run streams, half of them sampled; kill() in their middle; compare each token. Return the longest pause in s."""
    prompts = {}
    for which in range(NUM_STREAMS):
        prompt, seed = [which + 5] * 32, which if which % 2 else 0
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8 if seed else 0.0)
        prompts[client.submit(prompt, params, seed=seed)] = prompt, seed
    lengths, last, pause, is_killed = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 0.0), 0.0, False
    end = time.monotonic() + PATIENCE_S
    while not all(client.read(number).finish for number in prompts):
        now = time.monotonic()
        assert now < end, "the streams do not end"
        for number in prompts:
            progress = client.read(number)
            assert progress.error is None, progress.error
            if len(progress.token_ids) > lengths[number]:
                if is_killed:
                    pause = max(pause, now - last[number])
                lengths[number], last[number] = len(progress.token_ids), now
        if not is_killed and min(lengths.values()) > 20:
            kill()
            is_killed = True
        time.sleep(0.001)
    for number, (prompt, seed) in prompts.items():
        assert client.read(number).token_ids.tolist() == fake_tokens(prompt, NUM_TOKENS, VOCAB, seed), number
    client.discard(list(prompts))
    assert is_killed
    return pause


def in_the_client(fleet: RayFleet) -> None:
    """Kill an actor of the fleet under a client that routes by itself, and its engine under the next streams."""
    client = EngineClient(FleetTransport(fleet.addresses))
    changes: list[Change] = []
    try:
        fleet.follow(client, changes.append)
        wait_until(lambda: len(open_replicas(client)) == 2, "two replicas")
        actor, _ = fleet.pids()[0]
        killed_at = time.monotonic()
        pause = check_streams(client, lambda: os.kill(actor, signal.SIGKILL))
        wait_until(lambda: bool(changes) and len(open_replicas(client)) == 2, "the actor is back", PATIENCE_S)
        back = time.monotonic() - killed_at
        print(
            f"client: {NUM_STREAMS} streams exact over kill -9 of an actor; "
            f"pause {pause * 1000:.0f} ms; back {back:.1f} s after it"
        )
        assert changes[0].new in open_replicas(client)
        assert changes[0].old not in [one.address for one in client.replicas().replicas]
        pause = check_streams(client, lambda: os.kill(fleet.pids()[1][1], signal.SIGKILL))
        wait_until(lambda: len(open_replicas(client)) == 2, "the engine is back at its address")
        assert len(changes) == 1, "an engine that its actor starts again keeps its address"
        print(f"client: {NUM_STREAMS} streams exact over kill -9 of an engine; pause {pause * 1000:.0f} ms")
    finally:
        client.close()


def through_the_command(folder: Path) -> None:
    """Kill an actor of `engine-core ray` under the streams of a client of its router."""
    address = f"ipc://{folder}/router"
    own = ENGINE["executor_options"]
    options = [word for key, value in own.items() for word in ("--executor-options", f"{key}={value}")]
    plain = {name: value for name, value in ENGINE.items() if value is not own}
    options += [word for name, value in plain.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [
        sys.executable,
        "-m",
        "engine_core",
        "ray",
        "--listen",
        address,
        "--replicas",
        "2",
        "--replica-cpus",
        "0.5",
    ]
    program = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    while not (line := program.stdout.readline()).startswith("engine-core: ready at"):
        assert line, "the command has ended"
    client = EngineClient(ZmqTransport(address))
    try:
        before = open_replicas(client)
        assert len(before) == 2
        direct = EngineClient(ZmqTransport(before[0]))
        engine = direct.welcome.pid
        direct.close()
        actor = int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])
        pause = check_streams(client, lambda: os.kill(actor, signal.SIGKILL))
        seconds = wait_until(
            lambda: len(now := open_replicas(client)) == 2 and before[0] not in now, "the router is told of the replica"
        )
        print(f"router: {NUM_STREAMS} streams exact; pause {pause * 1000:.0f} ms; told {seconds:.1f} s after their end")
    finally:
        client.close()
        program.send_signal(signal.SIGTERM)
        status = program.wait(PATIENCE_S)
        program.stdout.close()
    assert status == 0, status
    wait_until(lambda: not Path(f"/proc/{engine}").exists(), "no engine stays behind")


def placed_workers(folder: Path) -> None:
    """Run one model's workers on two nodes, as a program of the first (tests/ray_cluster/placed_workers.py)."""
    cut = folder / "cut"
    with two_nodes(folder, num_cpus=4) as cluster:
        print(f"workers: {cluster.kind} stand for two machines", flush=True)
        environment = {**cluster.environment, CUT: str(cut) if cluster.namespaces else ""}
        program = subprocess.Popen(cluster.command("-m", "tests.ray_cluster.placed_workers"), env=environment)
        try:
            while program.poll() is None:
                if cut.exists():
                    cut.unlink()
                    cluster.cut(6.0)
                time.sleep(0.05)
        finally:
            program.kill()
            program.wait()
        assert program.returncode == 0, program.returncode


def main() -> int:
    """Run all; an assertion fails it."""
    with tempfile.TemporaryDirectory(prefix="engine-core-ray-") as folder:
        placed_workers(Path(folder))
    os.environ.update(own_token())
    begin = time.monotonic()
    with deploy(replicas=2, num_cpus=0.5, network=True, threads=1, **ENGINE) as fleet:
        print(f"deployed in {time.monotonic() - begin:.1f} s: {', '.join(fleet.addresses)}")
        in_the_client(fleet)
    with tempfile.TemporaryDirectory(prefix="engine-core-ray-") as folder:
        through_the_command(Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
