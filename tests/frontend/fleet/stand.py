"""Stand: a fleet over real engine cores with the fake executor, without sockets and time of its own."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from core.engine import EngineCore
from core.executors.fake import choice_seed, create
from frontend.fleet.driver import Driver
from frontend.fleet.fleet import Fleet
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.call import Call
from ipc.wire.messages import (
    Abort,
    AddRequest,
    CallDone,
    EngineStopping,
    ErrorCode,
    FinishReason,
    GetStatistics,
    Hello,
    Outputs,
    RequestFailed,
    ServerMessage,
    decode_client_message,
    encode,
)
from tests.fake_options import fake_options, with_options
from tests.fake_tokens import fake_tokens
from tests.resolved import resolved_config
from tests.simulation.engine_parts import served

VOCAB = 500
CONFIG = resolved_config(
    executor_options=fake_options(vocab_size=VOCAB, eos_token_id=1, max_model_len=256),
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=4,
    num_blocks_override=400,
    max_model_len=256,
)
STEP_S = 0.01


class PlayedReplica:
    """One engine: an EngineCore and a session of the fleet."""

    def __init__(self, config: ResolvedConfig, generation: int) -> None:
        executor = create(config)
        executor.initialize_cache(config)
        self.core = EngineCore(config, executor, generation)  # type: ignore[arg-type]
        self.served = served(config, executor.info, generation, 30_000)
        self.poison: int | None = None  # a prompt's first token that kills the engine in the step that computes it
        self.is_draining = False
        self.is_mute = False  # it stays connected, and says nothing
        self.is_paused = False  # it answers calls, and runs nothing
        self.refuses_from: int | None = None  # so many requests live: then the next is refused for want of room
        self._inbox: list[tuple[int, object]] = []
        self._is_killed_by_next = False

    def receive(self, frame: bytes) -> list[ServerMessage]:
        message = decode_client_message(frame)
        if self.is_mute:
            return []
        if self.is_paused and isinstance(message, GetStatistics):
            return [self.core.statistics(message.call, 0)]
        if isinstance(message, Hello):
            return [msgspec.structs.replace(self.served.welcome, session_token=b"t" * 16)]
        if isinstance(message, AddRequest):
            if self.is_draining:
                return [RequestFailed(message.number, ErrorCode.UNAVAILABLE, "it stops")]
            num_live = sum(self.core.scheduler.get_request_counts()) + len(self._inbox)
            if self.refuses_from is not None and num_live >= self.refuses_from:
                return [RequestFailed(message.number, ErrorCode.RESOURCE_EXHAUSTED, "full", 40)]
            first = int(np.frombuffer(message.prompt_token_ids, "<i4")[0])
            self._is_killed_by_next |= first == self.poison
        if isinstance(message, Abort | AddRequest | Call):
            self._inbox.append((1, message))
        return []

    def step(self, now: float) -> list[ServerMessage] | None:
        """Run a step; None where it has died in it."""
        if self.is_mute or self.is_paused:
            return []
        inbox, self._inbox = self._inbox, []
        if not inbox and not self.core.has_unfinished:
            return []
        replies = self.core.step(inbox, int(now * 1e9))  # type: ignore[arg-type]
        if self._is_killed_by_next:
            return None
        return [reply for _, reply in replies]


class Stand:
    """A fleet, its replicas by address, and what its clients have received. num_prefill: how many of them, the last,
    compute prompts for the others.
    """

    def __init__(
        self, count: int = 3, config: ResolvedConfig = CONFIG, num_prefill: int = 0, **options: object
    ) -> None:
        self.fleet = Fleet(**options)  # type: ignore[arg-type]
        self.driver = Driver(self.fleet, self)
        self.now = 100.0
        self.replicas: dict[str, PlayedReplica] = {}
        self.config = config
        self.tokens: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # (client, number, choice)
        self.finish: dict[tuple[int, int, int], FinishReason] = {}
        self.failed: dict[tuple[int, int], RequestFailed] = {}
        self.answers: list[ServerMessage] = []
        self.started: dict[tuple[int, int], int] = {}  # (client, number) -> cached tokens
        self.placed: list[str] = []  # addresses, in the order of the requests sent
        self._generation = 0
        self._open: dict[int, str] = {}  # by row
        self._arrived: list[tuple[int, bytes | None]] = []
        for index in range(count):
            self.start(f"ipc:///{index}")
            self.fleet.membership.join(f"ipc:///{index}", prefills=index >= count - num_prefill)
        self.turn(3)

    def start(self, address: str, **changes: object) -> PlayedReplica:
        """Start an engine at an address."""
        self._generation += 1
        config = with_options(self.config, **changes)
        self.replicas[address] = PlayedReplica(config, self._generation)
        return self.replicas[address]

    def kill(self, address: str) -> None:
        """End an engine; what it sent last has arrived."""
        del self.replicas[address]
        self._cut(address)

    def stop(self, address: str) -> None:
        """Let an engine end in order."""
        for row, at in self._open.items():
            if at == address:
                self._arrived.append((row, encode(EngineStopping())))
        self.kill(address)

    def _cut(self, address: str) -> None:
        for row, at in list(self._open.items()):
            if at == address:
                del self._open[row]
                self._arrived.append((row, None))

    # --- Connections ---

    def open(self, row: int, address: str, hello: bytes) -> None:
        self.close(row)
        if address in self.replicas:
            self._open[row] = address
            self.send(row, hello)
        else:
            self._arrived.append((row, None))

    def send(self, row: int, frame: bytes) -> bool:
        address = self._open.get(row)
        if address is not None:
            if isinstance(decode_client_message(frame), AddRequest):
                self.placed.append(address)
            self._arrived += [(row, encode(reply)) for reply in self.replicas[address].receive(frame)]
        return True

    def close(self, row: int) -> None:
        self._open.pop(row, None)

    def receive(self) -> list[tuple[int, bytes | None]]:
        arrived, self._arrived = self._arrived, []
        return arrived

    # --- time ---

    def turn(self, count: int = 1) -> None:
        """Let replicas run a step each, and the fleet take in what they send, so many times."""
        for _ in range(count):
            self.now += STEP_S
            for address, replica in list(self.replicas.items()):
                replies = replica.step(self.now)
                if replies is None:
                    self.kill(address)
                    continue
                rows = [row for row, at in self._open.items() if at == address]
                self._arrived += [(row, encode(reply)) for row in rows for reply in replies]
            self.exchange()

    def exchange(self) -> None:
        """Let the fleet take in what has arrived, and its clients what it sends."""
        self.driver.look()
        self.driver.take_in(self.now)
        self.driver.carry_out(self.now)
        self.driver.pass_time(self.now)
        for client, message in self.fleet.take_messages():
            self._deliver(client, message)

    def _deliver(self, client: int, message: ServerMessage) -> None:
        match message:
            case Outputs():
                self._deliver_rows(client, message)
            case RequestFailed():
                assert (client, message.number) not in self.failed
                self.failed[client, message.number] = message
            case CallDone():
                pass
            case _:
                self.answers.append(message)

    def _deliver_rows(self, client: int, message: Outputs) -> None:
        for number, num_cached in np.frombuffer(message.started, "<u4").reshape(-1, 2).tolist():
            assert (client, number) not in self.started, "a request begins twice"
            self.started[client, number] = num_cached
        numbers = np.frombuffer(message.numbers, "<u4").tolist()
        positions, counts = (
            np.frombuffer(message.positions, "<u4").tolist(),
            np.frombuffer(message.counts, "<u2").tolist(),
        )
        choices = np.frombuffer(message.choices or bytes(2 * len(numbers)), "<u2").tolist()
        finish = list(message.finish or bytes(len(numbers)))
        tokens, at = np.frombuffer(message.tokens, "<i4").tolist(), 0
        for row, (number, choice) in enumerate(zip(numbers, choices, strict=True)):
            known = self.tokens[client, number, choice]
            assert positions[row] == len(known), "a token is lost or doubled"
            assert (client, number, choice) not in self.finish
            known += tokens[at : at + counts[row]]
            at += counts[row]
            if finish[row]:
                self.finish[client, number, choice] = FinishReason(finish[row])

    # --- requests ---

    def submit(self, client: int, number: int, prompt: Sequence[int], **params: object) -> AddRequest:
        """Submit a request to the fleet."""
        given = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0, **params}
        salt, tenant = str(given.pop("cache_salt", "")), str(given.pop("tenant", ""))
        deadline_ms, pins = int(str(given.pop("deadline_ms", 0))), given.pop("pins", ())
        message = AddRequest(
            number,
            np.array(prompt, "<i4").tobytes(),
            SamplingParams(**given),  # type: ignore[arg-type]
            seed=number + 7,
            deadline_ms=deadline_ms,
            cache_salt=salt,
            tenant=tenant,
            pins=pins,  # type: ignore[arg-type]
        )
        self.fleet.submit(client, message, self.now)
        self.exchange()
        return message

    def run(self, most: int = 400) -> None:
        """Let time pass until no request is live."""
        for _ in range(most):
            if not self.fleet.has_unfinished:
                return
            self.turn()
        raise AssertionError(f"{self.fleet.requests.num_live} requests live after {most} turns")

    def check(self, client: int, message: AddRequest) -> None:
        """Check that a request has got exactly the tokens that it is due."""
        prompt = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
        for choice in range(message.params.n):
            seed = choice_seed(message.seed, choice) if message.params.temperature > 0 else 0
            due = fake_tokens(prompt, message.params.max_tokens or 0, VOCAB, seed)
            assert self.tokens[client, message.number, choice] == due, (client, message.number, choice)
            assert self.finish[client, message.number, choice] == FinishReason.LENGTH
            assert (client, message.number) in self.started

    def check_empty(self) -> None:
        """Check that nothing is left of any request."""
        fleet = self.fleet
        assert fleet.requests.num_live == 0
        assert (fleet.requests.num_waiting, fleet.requests.num_waiting_tokens, fleet.dispatch.num_queued) == (0, 0, 0)
        assert not fleet.replicas.live.any()
        assert not fleet.replicas.queued.any()
        assert not len(fleet.dispatch.suspects)
        assert not fleet.calls
        assert not fleet.requests.num_clients
        for replica in self.replicas.values():
            assert sum(replica.core.scheduler.get_request_counts()) == 0
