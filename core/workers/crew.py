"""Crew: the worker processes of one executor, from start to end. If one dies, all are ended."""

import contextlib
import select
import signal
import socket
import threading
from collections import deque
from typing import TypeVar

from core.execution.encoding import decode_output
from core.execution.executor import ModelInfo
from core.execution.plan import ModelRunnerOutput
from core.execution.shared_blocks import SharedBlocks
from core.model_files import progress
from core.workers.messages import (
    Allocate,
    Answer,
    Failed,
    Loaded,
    Number,
    Progress,
    Question,
    Result,
    Run,
    ShareBlocks,
    SharedPlaces,
    WarmUp,
    decode_answer,
    encode_message,
)
from core.workers.nodes import Nodes
from core.workers.processes import ChildProcess, WorkerProcess
from core.workers.shared_parts import Parts
from core.workers.wires import Place, Wires, Wiring, above, block_stream_of, make_wires
from ipc import errors
from ipc.errors import ConfigError, EngineCoreError, EngineStartError
from ipc.machine.channel import Channel, ChannelEndedError
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig

AnswerT = TypeVar("AnswerT", bound=Answer)
Value = TypeVar("Value")

_STACKS_S = 0.3  # time for processes that hang to print their stacks
_PATIENCE_S = 1800.0  # longest wait for an answer
_LAST_WORDS_S = 1.0  # time to exit for a process that has reported why it fails


class Crew:
    """A set of worker processes.

    They die with the thread that created this object, which must live as long as they do. Methods that talk to the
    workers are for one thread, but any thread may kill them; then a thread that waits for an answer gets an error.
    """

    def __init__(self, config: EngineConfig, places: list[Place], nodes: Nodes | None = None) -> None:
        """Start a process for each place, and make them load the model. nodes: the other machines, if there are any.

        Errors: OSError, EngineStartError.
        """
        self._places = places
        self._answering = next(place.number for place in places if place.answers)
        self._sampled: list[tuple[bytes, bytes | None]] = []  # of steps taken since the last run()
        self._channels: list[Channel] = []
        self._processes: list[WorkerProcess] = []
        self.failure: Failed | None = None  # the first one reported by a worker
        self.is_waiting = False  # for the engine, which takes no results while it encodes images
        self.running: deque[tuple[float, int]] = deque()  # (start in monotonic seconds, number of tokens) of steps
        self.num_taken = 0  # number of steps whose results were taken
        self._num_sent = 0  # number of plans
        self.adapters: set[str] = set()  # digests of those that the workers have
        self.features: set[bytes] = set()  # likewise
        self.reads_features = False  # whether each worker takes features; known after load()
        self._parts: Parts | None = None  # if the engine has a store of blocks
        self.blocks: SharedBlocks | None = None  # the workers', for that store, once they are allocated
        self.is_mourned = threading.Event()  # set when the core has been told about their end
        self.is_final = False  # and whether they are not restarted
        try:
            self._start(config, nodes)
        except BaseException:
            self.end()
            raise

    def _start(self, config: EngineConfig, nodes: Nodes | None) -> None:
        wiring = make_wires(self._places)
        try:
            here = len(wiring.wires)
            if config.kv_stores:
                mapped, asked = list(wiring.wires.values()), list[Channel]()
                if config.device != "cpu":  # whose blocks are in memory that no other process can map
                    mapped, asked = [], [self._channel_of(wires) for wires in mapped]
                asked += [
                    self._channel_to(wiring, block_stream_of(place.number, self._places))
                    for place in self._places[here:]
                ]
                self._parts = Parts(mapped, asked)
            for place in self._places[:here]:  # those on this machine
                child = ChildProcess(config, place, wiring.wires.pop(place.number))
                self._processes.append(child)
                self._channels.append(child.channel)
            self._channels += [self._channel_to(wiring, place.number) for place in self._places[here:]]
            if nodes is not None:
                self._processes += nodes.start(config, self._places, wiring.carried)
                wiring.carried.clear()  # the workers own them now
        finally:
            wiring.close()

    @staticmethod
    def _channel_of(wires: Wires) -> Channel:
        """Return a channel on which the worker with these wires is asked for its blocks."""
        ours, theirs = socket.socketpair()
        with theirs:
            wires.asked = above(theirs.fileno())
        return Channel(ours)

    @staticmethod
    def _channel_to(wiring: Wiring, stream: int) -> Channel:
        """Return a channel whose other end is carried to another machine, on this stream."""
        ours, theirs = socket.socketpair()
        with theirs:
            wiring.carried[stream] = above(theirs.fileno())
        return Channel(ours)

    @property
    def pids(self) -> list[int]:
        """Return the process ids by worker number; each is valid on its own machine."""
        return [process.pid for process in self._processes]

    @property
    def ended_fds(self) -> list[int]:
        """Return a descriptor for each process that becomes readable when it dies. This object owns them."""
        return [process.ended_fd for process in self._processes]

    def load(self) -> ModelInfo:
        """Wait until all have loaded the model.

        Errors: the workers'; EngineStartError if one has died; ConfigError if ranks would compute different bits.
        """
        answers = self._gather(Loaded)
        infos, self.reads_features = [one.info for one in answers], all(one.reads_features for one in answers)
        for ranks in self.by_stage(infos):
            if any(info.fingerprint != ranks[0].fingerprint for info in ranks):
                raise ConfigError(
                    "the ranks of a stage use different dtypes or kernels, because their machines' CPUs differ: "
                    "set --dtype and --cpu-kernels, such as avx2, so that they agree"
                )
        return infos[self._answering]

    def allocate(self, config: ResolvedConfig) -> ModelInfo:
        """Allocate the KV caches for a resolved config. Errors: as for load()."""
        info = self.ask(Allocate(config), Loaded)[self._answering].info
        if self._parts is not None and (places := self.ask(ShareBlocks(), SharedPlaces))[0].layout:
            self.blocks = self._parts.join(places)
        return info

    def settle(self) -> None:
        """Wait until each worker has run all plans that were sent, or until they are lost. For any thread.

        Errors: BlocksLostError.
        """
        if self._parts is not None:
            self._parts.wait(self._num_sent, lambda: self.is_mourned.is_set() or not self._processes)

    def warm_up(self) -> int:
        """Run a first step. Return its duration in ns: the sum over stages of their slowest ranks; 0: unknown.

        Errors: as for load().
        """
        answers = [answer.value or 0 for answer in self.ask(WarmUp(), Number)]
        return sum(max(stage) for stage in self.by_stage(answers))

    def by_stage(self, answers: list[Value]) -> list[list[Value]]:
        """Return the answers of ask() by stage, and within it by rank."""
        size = self._places[0].size
        return [answers[first : first + size] for first in range(0, len(answers), size)]

    def ask(self, question: Question, kind: type[AnswerT]) -> list[AnswerT]:
        """Return the workers' answers by worker number. Errors: as for load()."""
        message = encode_message(question)
        for channel in self._channels:
            with contextlib.suppress(ChannelEndedError):  # then the answer fails
                channel.send(message)
        return self._gather(kind)

    def _gather(self, kind: type[AnswerT]) -> list[AnswerT]:
        answers = list[AnswerT]()
        for rank in range(len(self._channels)):
            try:
                self._wait(rank)
                answer = self._receive(rank)
            except ChannelEndedError:
                raise self._error() from None
            assert isinstance(answer, kind), f"worker {rank} answered {answer!r:.80}, not {kind.__name__}"
            answers.append(answer)
        return answers

    def _wait(self, rank: int) -> None:
        """Wait until a worker has sent something. Errors: ChannelEndedError if another has died, or it sends nothing.

        Workers may wait for one another within a question.
        """
        if self._channels[rank].has_frame:
            return
        poller = select.poll()
        for fd in (self._channels[rank].socket.fileno(), *self.ended_fds):
            poller.register(fd, select.POLLIN)
        ready = dict(poller.poll(_PATIENCE_S * 1000))
        if self._channels[rank].socket.fileno() not in ready:
            raise ChannelEndedError("a worker has died, or does not answer")

    def tell(self, message: Question, *, to_first_stage: bool = False) -> None:
        """Send all workers, or those of the first stage, a message that has no answer.

        If workers are gone, take() reports it, not this method.
        """
        encoded = encode_message(message)
        for place, channel in zip(self._places, self._channels, strict=True):
            if place.stage == 0 or not to_first_stage:
                with contextlib.suppress(ChannelEndedError):
                    channel.send(encoded)

    def run(self, plan: bytes) -> None:
        """Make all workers run a step. If workers are gone, take() reports it, not this method."""
        message = encode_message(Run(plan))
        earlier = encode_message(Run(plan, self._sampled)) if self._sampled else message
        self._sampled = []
        self._num_sent += 1
        for place, channel in zip(self._places, self._channels, strict=True):
            with contextlib.suppress(ChannelEndedError):
                channel.send(message if place.is_last_stage else earlier)

    def take(self) -> ModelRunnerOutput:
        """Wait for the oldest step and return its output. Errors: ChannelEndedError if it will not arrive."""
        answer = self._receive(self._answering)
        assert isinstance(answer, Result), f"a worker answered {answer!r:.80} to a step"
        output = decode_output(answer.output)
        if self._answering >= self._places[0].size:  # there are earlier stages
            counts = None if output.counts is None else output.counts.tobytes()
            self._sampled.append((output.token_ids.tobytes(), counts))
        return output

    def _receive(self, rank: int) -> Answer:
        """Return a worker's next answer. Errors: ChannelEndedError if it has failed or ended."""
        while True:
            answer = decode_answer(self._channels[rank].receive())
            if isinstance(answer, Failed):
                self.failure = self.failure or answer
                raise ChannelEndedError(answer.text)
            if not isinstance(answer, Progress):
                return answer
            progress.tell(answer.share)

    def _error(self) -> EngineCoreError:
        text = self._last_words()
        if self.failure is None:
            return EngineStartError(f"while the model loads, {text}")
        kind = getattr(errors, self.failure.error, None)
        if isinstance(kind, type) and issubclass(kind, EngineCoreError):
            return kind(self.failure.text)
        return EngineStartError(f"a worker failed: {self.failure.text} (see its standard error)")

    def _last_words(self) -> str:
        """End all workers, look for the failure that one of them has reported, and describe the first end."""
        poller = select.poll()
        for fd in self.ended_fds:
            poller.register(fd, select.POLLIN)
        poller.poll(_LAST_WORDS_S * 1000)
        text = self.describe_end()
        self.kill()
        for rank in range(len(self._channels)):
            with contextlib.suppress(ChannelEndedError):
                while self.failure is None:
                    self._receive(rank)
        return text

    def describe_end(self) -> str:
        """Describe which of them ended first, and how: "worker 0 (4711) was killed by SIGKILL"."""
        if self.failure is not None:
            return f"a worker failed: {self.failure.text}"
        for number, process in enumerate(self._processes):
            if (end := process.end) is not None:
                return f"worker {number} {end}"
        return "the workers hang"

    def print_stacks(self) -> None:
        """Make each worker print its threads' stacks to standard error."""
        for process in self._processes:
            process.signal(signal.SIGUSR1)
        poller = select.poll()
        for fd in self.ended_fds:
            poller.register(fd, select.POLLIN)
        poller.poll(_STACKS_S * 1000)

    def kill(self) -> None:
        """Kill all live workers and wait for their end. Their sockets are kept, so that unread data can be read."""
        if self._parts is not None:
            self._parts.cut()
        for process in self._processes:
            process.signal(signal.SIGKILL)
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """Kill all workers and release everything."""
        self.kill()
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.close()
        self._processes = []
        if self._parts is not None:
            self._parts.close()
