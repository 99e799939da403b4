"""The service and the streams of a cell of the fault matrix: `engine-core serve` in real processes, and a client."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.errors import EngineCoreError
from ipc.params.sampling_params import SamplingParams
from tests.frontend.engine.supervised import Patience, undisturbed
from tests.placed import PREFIX

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 40.0
NUM_STREAMS, PROMPT, SHORTEST, LONGER = 64, 40, 60, 2  # stream n has SHORTEST + LONGER * n tokens
POISONS = {"exception": "raise", "busy": "hang", "MemoryError": "memory"}
POISON_TOKEN = 999

#: Tokens that a poisoned row has when it does harm, by moment.
_PLACES = {"idle": 0, "prefill": 0, "decode": PROMPT + 20, "finishing": PROMPT + 70}
_LATER = PROMPT + 30


#: sitecustomize.py of an HTTP server's process: what it does on SIGUSR2, as the file "fault" beside it says.
_HARM = """
import pathlib, signal, sys
def fault(*_):
    word = (pathlib.Path(__file__).parent / "fault").read_text()
    if word == "exception":
        raise RuntimeError("planted")
    if word == "MemoryError":
        raise MemoryError("planted")
    while True:
        pass
if "PLACEfrontend.http" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, fault)
""".replace("PLACE", PREFIX)


class Service:
    """`engine-core serve` at one address, started anew where the fault was its supervisor's."""

    def __init__(
        self, folder: Path, fault: str, moment: str, *, has_standby: bool = False, http_port: int | None = None
    ) -> None:
        self.address, self.owner_file = f"ipc://{folder}/s", str(folder / "owner")
        self._folder, self._has_http = folder, http_port is not None
        self._options = [
            "--executor-option",
            "vocab_size=1000",
            "--max-num-seqs",
            str(NUM_STREAMS + 8),
            "--executor-option",
            "step_us=2000",
        ]
        self._options += ["--max-num-batched-tokens", "96", "--restarts", "60", "--hang-timeout", "0.5"]
        self._options += ["--executor", "fake", "--owner-file", self.owner_file, "--listen", self.address]
        self._options += ["--standby", "model", "--start-timeout", "30"] if has_standby else ["--start-timeout", "15"]
        if http_port is not None:
            self._options += ["--http", f"127.0.0.1:{http_port}"]
            (folder / "sitecustomize.py").write_text(_HARM)
        if fault in POISONS:
            self._options += [
                "--executor-option",
                f"poison={POISONS[fault]}:{POISON_TOKEN}:{_PLACES.get(moment, _LATER)}",
            ]
        self.process = self._spawn()

    def _spawn(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "engine_core", "serve", *self._options]
        path = f"{ROOT}:{self._folder}" if self._has_http else str(ROOT)
        environment = {**os.environ, "PYTHONPATH": path}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        return subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload,no-any-return]

    def wait_ready(self) -> bool:
        """Return whether it became ready."""
        assert self.process.stdout is not None
        is_ready = "ready" in self.process.stdout.readline()
        return is_ready and (not self._has_http or "HTTP at" in self.process.stdout.readline())

    def start_again(self) -> None:
        """Start it at its address, as a service manager does with a service that has died."""
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = self._spawn()

    def engine_pid(self, *, other_than: int = 0) -> int:
        """Return the engine's process, or another one of its kind, as soon as there is one. Errors: AssertionError."""
        return self._pid_of("core", other_than)

    def worker_pid(self, *, other_than: int = 0) -> int:
        """Return the HTTP server's process, or another one of its kind, as engine_pid() does."""
        return self._pid_of("frontend.http", other_than)

    def _pid_of(self, package: str, other_than: int) -> int:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self.process.poll() is None:
            if found := [pid for pid in self._children(f"-m\0{PREFIX}{package}\0") if pid != other_than]:
                return found[0]
            time.sleep(0.002)
        raise AssertionError(f"there is no process of {package}, other than {other_than}")

    def _children(self, words: str) -> list[int]:
        """Return the processes that it has started with these words in their command line."""
        found = []
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
                pids = map(int, children.read_text().split())
                found += [pid for pid in pids if words.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return found

    def standby_pid(self, engine: int, *, is_prepared: bool) -> int:
        """Return the standby beside this engine; is_prepared: once it has worked and rests."""
        pid = self.engine_pid(other_than=engine)
        end, last, rested = time.monotonic() + PATIENCE_S, -1, 0
        while is_prepared and rested < 10 and time.monotonic() < end:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except FileNotFoundError:  # it was not prepared in time, and another one is made
                pid, last, rested = self.engine_pid(other_than=engine), -1, 0
                continue
            worked = int(fields[11]) + int(fields[12])  # utime and stime, in ticks
            rested = rested + 1 if worked == last and worked > 10 and fields[0] == "S" else 0
            last = worked
            time.sleep(0.03)
        return pid

    def close(self) -> None:
        """End it, and all that it has started."""
        engines = [] if self.process.poll() is not None else self._children("-m\0")
        for pid in (*engines, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Streams:
    """The 64 streams of one client, and what they must be."""

    def __init__(self, address: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.client = EngineClient(ZmqTransport(address, grace=PATIENCE_S), hello_timeout=5.0)
                break
            except EngineCoreError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        self.numbers: list[int] = []
        self.prompts = np.full((NUM_STREAMS, PROMPT), 7)
        self.prompts[:, 0] = np.arange(NUM_STREAMS)

    def submit(self) -> None:
        """Send all requests."""
        for index, prompt in enumerate(self.prompts.tolist()):
            length = SHORTEST + LONGER * index
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            self.numbers.append(self.client.submit(prompt, params, seed=0))

    def submit_poison(self) -> None:
        """Send the request that does harm; it fails alone, and is not looked at."""
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        self.client.submit([POISON_TOKEN] + [7] * (PROMPT - 1), params, seed=0)

    def warm_up(self) -> None:
        """Run a request, so that the usual time of a step is known: the first step of all may take 300 s."""
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        number = self.client.submit([8] * PROMPT, params, seed=0)
        while not self.client.read(number).finish:
            self.client.wait(np.array([number]), timeout=0.5)

    def wait_for(self, is_reached: Callable[[list[int], int], bool]) -> None:
        """Wait until is_reached(tokens of each stream, number of finished ones), or all have finished."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            progress = [self.client.read(number) for number in self.numbers]
            num_finished = sum(bool(one.finish) for one in progress)
            if is_reached([len(one.token_ids) for one in progress], num_finished) or num_finished == NUM_STREAMS:
                return
            time.sleep(0.002)

    def wait_until_read(self) -> None:
        """Wait until the engine has read all requests: a drain refuses what comes after it."""
        self.client.statistics()  # answered behind what was sent before

    def close(self) -> None:
        """Leave."""
        self.client.close()

    def finish(self) -> None:
        """Wait for all ends."""
        patience = Patience(self.client, self.numbers)
        while left := [number for number in self.numbers if not self.client.read(number).finish]:
            with contextlib.suppress(EngineCoreError):
                self.client.wait(np.array(left), timeout=0.5)
            if self.client.error is not None:
                return
            patience.check()

    def check(self, kind: str) -> None:
        """Compare every stream with its golden one: whole, or for "told" as far as it came."""
        golden = undisturbed(self.prompts, SHORTEST + LONGER * NUM_STREAMS)
        for index, number in enumerate(self.numbers):
            progress, length = self.client.read(number), SHORTEST + LONGER * index
            tokens = progress.token_ids
            assert (tokens == golden[index, : len(tokens)]).all(), f"stream {index} has other tokens"
            if kind == "exact":
                assert progress.error is None, f"stream {index}: {progress.error}"
                assert len(tokens) == length, f"stream {index}: {len(tokens)} of {length} tokens"
            else:
                is_over = len(tokens) == length or progress.error is not None or self.client.error is not None
                assert is_over, f"stream {index} was told nothing"
