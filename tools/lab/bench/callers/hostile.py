"""What one client can cost the others: the longest gap in a witness's stream while another client does its worst.

Engine, witness and hostile client are separate processes, so no gap comes from sharing an interpreter. Steps take
step_us each. On a machine with few cores the hostile client also competes for them: "busy" is a client that only
computes and sends nothing, so its gap comes from the machine and not from the border. For the longest gap each result
has the time for which threads of engine and witness were ready to run and had no core, summed, and what the hypervisor
took: the rest of the gap comes from the border.

`python -m tools.lab.bench.callers.hostile ADDRESS` is the witness: for each line that it reads, it prints its longest
gap with these waits, and its number of messages.
"""

import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

from core.executors.fake_options import with_fake_options
from frontend.engine.process import EngineProcess
from ipc.errors import InvalidRequestError
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.version import NAME, VERSION
from ipc.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    AddRequest,
    GetStatistics,
    Hello,
    Outputs,
    RequestFailed,
    Statistics,
    Welcome,
    decode_server_message,
    encode,
)
from ipc.wire.scheduling_messages import Explain, Explanation

# Grammars that an untrusted client might send: random combinations of pieces of regular expressions, grammars and
# schemas.


_PIECES = (
    *(
        "start: ",
        "root ::= ",
        "a b ",
        "| ",
        "/[a-z]*/ ",
        '"x" ',
        "(",
        ")",
        "+",
        "*",
        "?",
        "{1,1000}",
        "\n",
        "a: ",
        "b: ",
    ),
    *(
        ".*",
        "[^x]",
        "\\d",
        "\\p{L}",
        "^",
        "$",
        "(?:",
        "(?i)",
        "{5000}",
        "%json {}",
        "%ignore /x/",
        "<eos>",
        "~3",
        "é",
        "\0",
    ),
    *('{"type":"object"', '"anyOf":[', '"$ref":"#"', "}", "]", ":", ",", "[lazy]", "[max_tokens=3]", "@x", "::=", "//"),
)


def hostile_grammar(rng: random.Random, schemas: list[dict[str, Any]]) -> dict[str, str]:
    """Return a field of StructuredOutputsParams: a grammar made of pieces, or one of `schemas` with errors in it."""
    kind = rng.choice(["regex", "grammar", "gbnf", "json"])
    if kind == "json":
        text = json.dumps(rng.choice(schemas))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(_PIECES) + text[at + rng.randrange(3) :]
        return {"json": text}
    text = "".join(rng.choice(_PIECES) for _ in range(rng.randrange(1, 40)))
    begin = {"regex": "", "grammar": "start: ", "gbnf": "root ::= "}[kind]
    return {kind if kind == "regex" else "grammar": begin + text}


_STEP_US = 2000
_MANY = 20_000  # requests that wait
_STORM_S = 3.0
_LIMIT_S = 60.0
_VOCAB_SIZE = 49_152  # of the demo model


class Gap(NamedTuple):
    """A time without a message. Seconds."""

    seconds: float = 0.0
    cpu_wait: float = 0.0  # waits for a core, of all threads of engine and witness
    steal: float = 0.0  # of all cores, in steps of 10 ms


class Gaps(NamedTuple):
    """The gaps of a stream."""

    longest: Gap
    p99: float  # seconds
    own_p99: float  # seconds, of the gaps without their `cpu_wait`: as if every thread had a core
    rate: float  # messages a second


class Waits:
    """How long threads of two processes have waited for a core so far, and the time that the hypervisor took.

    Threads that start later are not counted, such as an engine's thread that prepares grammars, for which nothing
    waits.
    """

    def __init__(self, *pids: int) -> None:
        tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
        self._fds = [os.open(task / "schedstat", os.O_RDONLY) for task in tasks]
        self._stat = os.open("/proc/stat", os.O_RDONLY)

    def read(self) -> tuple[float, float]:
        """Return the seconds of both."""
        wait_ns = sum(int(os.pread(fd, 100, 0).split()[1]) for fd in self._fds)
        return wait_ns / 1e9, int(os.pread(self._stat, 200, 0).split()[8]) / os.sysconf("SC_CLK_TCK")


class HostileClient:
    """A client without flow control and checks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.connect(address)
        self.send(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "hostile"))
        welcome = decode_server_message(self.socket.recv())
        assert isinstance(welcome, Welcome), welcome
        self.pid = welcome.pid

    def send(self, *messages: Any) -> None:
        """Send messages, or unchanged frames."""
        for one in messages:
            self.socket.send(one if isinstance(one, bytes) else encode(one))

    def receive(self, kind: type) -> None:
        """Wait for a message of this kind."""
        end = time.monotonic() + _LIMIT_S
        while (left := end - time.monotonic()) > 0 and self.socket.poll(int(left * 1000)):
            if isinstance(decode_server_message(self.socket.recv()), kind):
                return
        raise TimeoutError(f"no {kind.__name__} within {_LIMIT_S:g} s")

    def settle(self) -> None:
        """Wait until the engine has processed what was sent."""
        self.send(GetStatistics(1))
        self.receive(Statistics)


def tiny_request(number: int, max_tokens: int, **params: Any) -> AddRequest:
    """Return a request of two tokens."""
    prompt = np.array([number % 997, 3], "<i4").tobytes()
    options = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})
    return AddRequest(number, prompt, options, 0)


def _huge_list() -> bytes:
    """Return a request of 8 MiB whose allowed_token_ids is one list."""
    fields = msgspec.msgpack.decode(encode(tiny_request(1, 8)))
    position = SamplingParams.__struct_fields__.index("allowed_token_ids")
    parts = [msgspec.msgpack.encode(field) for field in fields]
    head = b"".join(msgspec.msgpack.encode(value) for value in fields[3][:position])
    parts[3] = b"\xdc" + struct.pack(">H", position + 1) + head + b"\xdd" + struct.pack(">I", 8_300_000)
    parts[3] += bytes([1]) * 8_300_000
    return bytes([0x90 + len(parts)]) + b"".join(parts)


def _huge_lists(client: HostileClient) -> None:
    client.send(*[_huge_list()] * 6)


def _biases(client: HostileClient) -> None:
    bias = dict.fromkeys(range(900), 1.0)
    client.send(*(tiny_request(number, 8, logit_bias=bias) for number in range(2000)))
    client.settle()


def _unknown_aborts(client: HostileClient) -> None:
    client.send(*[encode(Abort(np.arange(65_536, dtype="<u4").tobytes(), b""))] * 100)


def _many_parts(client: HostileClient) -> None:
    for _ in range(1_000_000):
        client.socket.send(b"x", zmq.SNDMORE)
    client.socket.send(b"x")


def _explanations(client: HostileClient) -> None:
    client.send(*(tiny_request(number, 100_000) for number in range(_MANY)))
    client.settle()
    client.send(*(Explain(call, -1, 0, 1000) for call in range(30)))
    end = time.monotonic() + _STORM_S
    while time.monotonic() < end:
        client.receive(Explanation)
        client.send(Explain(99, -1, 0, 1000))


def _mass_abort(client: HostileClient) -> None:
    client.send(*(tiny_request(number, 100_000) for number in range(_MANY)))
    client.settle()
    client.send(Abort(np.arange(_MANY, dtype="<u4").tobytes(), b""))
    client.settle()


def _tiny_calls(client: HostileClient) -> None:
    frame, end = encode(Abort(np.arange(1, dtype="<u4").tobytes(), b"")), time.monotonic() + _STORM_S
    while time.monotonic() < end:
        client.send(frame)


@cache
def _grammar_requests() -> list[AddRequest]:
    """Return requests with mostly invalid grammars."""
    rng, requests = random.Random(0), list[AddRequest]()
    while len(requests) < _NUM_GRAMMARS:
        with contextlib.suppress(InvalidRequestError):
            params = StructuredOutputsParams(**hostile_grammar(rng, _SCHEMAS))  # type: ignore[arg-type]
            requests.append(tiny_request(len(requests), 20, structured_outputs=params, ignore_eos=False))
    return requests


def _grammars(client: HostileClient) -> None:
    """Send mostly invalid grammars, _WINDOW at a time, until each was refused or its request has ended."""
    sent, ended, end = 0, 0, time.monotonic() + _LIMIT_S
    while ended < _NUM_GRAMMARS:
        for request in _grammar_requests()[sent : ended + _WINDOW]:
            client.send(request)
            sent += 1
        if not client.socket.poll(max(1, int((end - time.monotonic()) * 1000))):
            raise TimeoutError(f"{ended} of {_NUM_GRAMMARS} requests have ended after {_LIMIT_S} s")
        message = decode_server_message(client.socket.recv())
        if isinstance(message, Outputs):
            ended += int(np.count_nonzero(np.frombuffer(message.finish, np.uint8)))
        ended += isinstance(message, RequestFailed)


def busy(client: HostileClient) -> None:
    """Compute, and send nothing."""
    end = time.monotonic() + _STORM_S
    while time.monotonic() < end:
        pass


_FIRST_GRAMMARS = "1,000 hostile grammars, the first of their engine"
_GRAMMARS = "1,000 hostile grammars"
CASES: dict[str, Callable[[HostileClient], None]] = {
    "nothing": lambda client: time.sleep(_STORM_S),
    "busy": busy,
    "6 lists of 8.3 million numbers": _huge_lists,
    "2,000 requests with 900 biases": _biases,
    "100 Aborts of 65,536 unknown numbers": _unknown_aborts,
    "a message of 1,000,000 parts": _many_parts,
    "explanations of 20,000 requests": _explanations,
    "an Abort of 20,000 requests": _mass_abort,
    "a tight loop of tiny messages": _tiny_calls,
    _FIRST_GRAMMARS: _grammars,
    _GRAMMARS: _grammars,
}
_IDLE_S = 6.0  # after which an engine has made its vocabulary
_NUM_GRAMMARS, _WINDOW = 1000, 4
_SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]},
    {"type": "array", "items": {"anyOf": [{"type": "string", "format": "date"}, {"enum": [1, None, "x"]}]}},
]


def measure_hostile(config: EngineConfig, *, rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each case: the witness's longest gap in ms, and its messages a second."""
    config = msgspec.structs.replace(
        with_fake_options(config, vocab_size=_VOCAB_SIZE, step_us=_STEP_US, max_model_len=1_000_000),
        model=config.model or str(resolve_model(None)),  # grammars need a tokenizer
        max_num_queued_requests=4 * _MANY,
    )
    for name, act in CASES.items():
        with EngineProcess(config) as engine:
            if act == _grammars:
                _grammar_requests()  # made now, so that it does not take the engine's cores during the measurement
            if name == _GRAMMARS:
                time.sleep(_IDLE_S)
            found = measure_case(engine.address, act, waits=act == _grammars)
        names = {"engine": NAME, "version": VERSION, "workload": "hostile", "rep": rep, "case": name}
        longest, cpu_wait, steal = (round(seconds * 1000, 1) for seconds in found.longest)
        gaps = {
            "longest_gap_ms": longest,
            "cpu_wait_ms": cpu_wait,
            "steal_ms": steal,
            "p99_gap_ms": round(found.p99 * 1e3, 2),
            "own_p99_gap_ms": round(found.own_p99 * 1e3, 2),
        }
        yield {**names, "step_ms": _STEP_US / 1000, **gaps, "messages_s": round(found.rate)}


def measure_case(address: str, act: Callable[[HostileClient], None], *, waits: bool = False) -> Gaps:
    """Return the witness's gaps while a client acts.

    waits: act() waits until its work is done; otherwise one more second is measured.
    """
    command = [sys.executable, "-m", __name__, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as witness:
        assert witness.stdin is not None
        assert witness.stdout is not None
        witness.stdout.readline()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client = HostileClient(context, address)
        time.sleep(0.5)
        _ask(witness)
        begin = time.monotonic()
        act(client)
        if not waits:
            time.sleep(1.0)
        *gap, p99, own_p99, count = _ask(witness)
        seconds = time.monotonic() - begin
        context.destroy(linger=0)
        witness.kill()
    return Gaps(Gap(*gap), p99, own_p99, count / seconds)


def _ask(witness: "subprocess.Popen[str]") -> list[float]:
    assert witness.stdin is not None
    assert witness.stdout is not None
    witness.stdin.write("\n")
    witness.stdin.flush()
    return [float(word) for word in witness.stdout.readline().split()]


def witness(address: str) -> None:
    """Follow one long stream; for each line of standard input print the longest gap, the 99th percentile of all gaps
    and of their own parts, and the number of messages since the last line.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = HostileClient(context, address)
    client.send(tiny_request(0, 900_000))
    asked = threading.Event()
    threading.Thread(target=_wait_for_lines, args=(asked,), daemon=True).start()
    waits, gaps = Waits(client.pid, os.getpid()), list[Gap]()
    print("ready", flush=True)
    last, before = time.monotonic(), waits.read()
    while client.socket.poll(int(_LIMIT_S * 1000)):
        client.socket.recv()
        now, after = time.monotonic(), waits.read()
        gaps.append(Gap(now - last, after[0] - before[0], after[1] - before[1]))
        last, before = now, after
        if asked.is_set():
            asked.clear()
            seconds, own = sorted(gap.seconds for gap in gaps), sorted(gap.seconds - gap.cpu_wait for gap in gaps)
            index = len(gaps) * 99 // 100
            print(*max(gaps), seconds[index], max(0.0, own[index]), len(gaps), flush=True)
            gaps.clear()


def _wait_for_lines(asked: threading.Event) -> None:
    for _ in sys.stdin:
        asked.set()


if __name__ == "__main__":
    witness(sys.argv[1])
