"""WorkersExecutor: runs plans in worker processes and restarts them when they die. The engine goes on.

A separate thread starts the workers and waits for their end. What it reports to the core is an input like any other.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from core import log
from core.execution.executor import Costs, ExecutorEndedError, ModelInfo, StepCosts, StepHandle
from core.execution.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput, encode_plan
from core.execution.shared_blocks import SharedBlocks
from core.grammars.grammars import model_grammars
from core.inputs import ExecutorLost, ExecutorNews, ExecutorRestored
from core.workers.crew import Crew
from core.workers.messages import (
    CountBlocks,
    DropAdapters,
    FindMemory,
    MeasureCosts,
    Measured,
    MeasuredSteps,
    MeasureSteps,
    Number,
)
from core.workers.nodes import Nodes
from core.workers.shared_parts import replace_parts
from core.workers.step_clock import StepClock
from core.workers.wires import places_of
from ipc.errors import ConfigError, EngineCoreError, EngineStartError
from ipc.machine.channel import ChannelEndedError
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.workers import first_machine, in_one_process, num_machines

if TYPE_CHECKING:
    from core.adapters.store import Adapters
    from core.features.store import Features
    from core.workers.sent_features import FeatureSender

MAX_LOSSES = 3  # within _LOSSES_S; the last of these ends the engine
_LOSSES_S = 60.0
_BACKOFF_S = (0.0, 0.5)  # before the first restart within _LOSSES_S, and before the second
_JOIN_S = 240.0  # for the other machines to join at the start; less than the time that an engine has for it
_IDLE_S = 1.0  # between two checks while no step runs
_LOOK_S = 0.25  # between two checks of a running step; one check never counts for more, however long it took


class WorkersExecutor:
    """An Executor and a MortalExecutor whose steps run in other processes.

    config: the engine's; each worker runs the executor named in it. Errors: those of that executor's constructor.
    """

    adapters: "Adapters | None" = None
    features: "Features | None" = None  # which the workers read
    _feature_sender: "FeatureSender | None" = None

    def __init__(self, config: EngineConfig) -> None:
        self._config = msgspec.structs.replace(in_one_process(config), lora_modules={})  # adapters are sent
        size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self._places = places_of(size, stages, config.nnodes, first_machine(config))
        self._nodes = Nodes(config) if num_machines(config) > 1 else None
        self._resolved: ResolvedConfig | None = None
        self.shared_blocks: SharedBlocks | None = None  # for a store of blocks
        self._tell: Callable[[ExecutorNews], None] | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._crew: Crew | None = None
        self._error: BaseException | None = None  # from the first start
        self._begun = threading.Event()
        self._restored: deque[Crew] = deque()  # those that the core has not allowed to go on yet
        self._clock = StepClock(0)
        self._losses: list[float] = []  # times of losses, in monotonic seconds
        self._last_words = ""  # why the workers are not restarted
        self._starting: Crew | None = None  # replaces one that was lost
        self._thread = threading.Thread(target=self._watch, name="workers", daemon=True)
        self._thread.start()
        self._begun.wait()
        if self._error is not None:
            self._thread.join()
            self._release()
            raise self._error
        assert self._crew is not None, "the workers have begun"
        self._serving: Crew = self._crew  # used by the engine thread
        try:
            self.info: ModelInfo = self._serving.load()
            self.adapters = _sent_adapters(config)
            self._make_features(config)
        except BaseException:
            self.close()
            raise
        self.grammars = model_grammars(config, self.info.vocab_size, self.info.eos_token_ids)

    def _make_features(self, config: EngineConfig) -> None:
        """Make the features that the workers read, if they do."""
        if not self._serving.reads_features:
            return
        # Imported here because only models with images or given embeddings need it, and it takes time.
        from core.workers.sent_features import FeatureSender, sent_features

        self.features = sent_features(config, self.info.dtype)
        self._feature_sender = None if self.features is None else FeatureSender(self.features)

    # --- the engine thread ---

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the number of blocks that fit in memory_bytes of each machine, or of each worker's GPU.

        Each worker holds a part of a block.
        """
        answers = self._serving.ask(CountBlocks(memory_bytes, block_size), Number)
        counts = [max(1, answer.value or 0) for answer in answers]
        if len(counts) == 1 or self._config.device == "cuda":
            return min(counts)
        machines = {place.node: place.neighbours for place in self._places}
        return min(int(1 / sum(1 / counts[number] for number in numbers)) for numbers in machines.values())

    def cache_memory_bytes(self) -> int | None:
        """Return the smallest of the workers' free bytes; None: they use host memory."""
        values = [answer.value for answer in self._serving.ask(FindMemory(), Number)]
        return min((value for value in values if value is not None), default=None)

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Allocate the KV cache of the resolved config in each worker. Errors: OutOfMemoryError."""
        self._resolved = in_one_process(config)
        self.info = self._serving.allocate(self._resolved)
        if (blocks := self._serving.blocks) is not None:
            self.shared_blocks = blocks._replace(settle=lambda: self._serving.settle())

    def measure_costs(self) -> Costs:
        """Return the largest costs of any worker."""
        answers = self._serving.ask(MeasureCosts(), Measured)
        return Costs(*(max(values) for values in zip(*(answer.costs for answer in answers), strict=True)))

    def measure_steps(self) -> StepCosts:
        """Return the sum of the stages' durations. The ranks of a stage run the same steps together."""
        answers = self._serving.ask(MeasureSteps(), MeasuredSteps)
        stages = [ranks[0].costs for ranks in self._serving.by_stage(answers)]
        return StepCosts(tuple(map(sum, zip(*(one.step_ns for one in stages)))), stages[-1].draft_ns)  # noqa: B905

    def warm_up(self) -> int:
        """Return the duration of the slowest worker's first step, in ns."""
        duration_ns = self._serving.warm_up()
        self._clock = StepClock(duration_ns)
        return duration_ns

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Send the plan to all workers and return."""
        num_tokens = plan.num_tokens
        if self.adapters is not None:
            self._send_adapters(self.adapters, plan)
        if self._feature_sender is not None:
            self._send_features(self._feature_sender, plan)
        self._serving.running.append((time.monotonic(), num_tokens))
        self._serving.run(encode_plan(plan))
        return _Step(self, self._serving, plan.step, len(plan.rows))

    def _send_features(self, sender: "FeatureSender", plan: SchedulerOutput) -> None:
        """Encode the plan's images, and send the workers the rows that they need."""
        crew = self._serving
        crew.is_waiting = True
        for message in sender.messages(plan, crew.features):
            crew.tell(message, to_first_stage=True)  # which passes on what it makes of them
        crew.is_waiting = False

    def _send_adapters(self, adapters: "Adapters", plan: SchedulerOutput) -> None:
        """Give the workers the adapters that start to be used, and let them forget those that are gone."""
        crew = self._serving
        if gone := crew.adapters - adapters.digests:
            crew.tell(DropAdapters(sorted(gone)))
            crew.adapters -= gone
        for _, digest in plan.adapters:
            if digest not in crew.adapters:
                crew.adapters.add(digest)
                for message in adapters.find(digest).messages():
                    crew.tell(message)

    def take(self, crew: Crew, step: int, num_rows: int) -> ModelRunnerOutput:
        """Wait for a step that was sent to this crew. Errors: ExecutorEndedError."""
        try:
            output = crew.take()
        except ChannelEndedError:
            self._wait_for_verdict(crew)
            return ModelRunnerOutput(step, np.full(num_rows, NO_TOKEN, np.int32))
        begun, num_tokens = crew.running.popleft()
        crew.num_taken += 1
        self._clock.note(num_tokens, time.monotonic() - begun)
        return output

    def _wait_for_verdict(self, crew: Crew) -> None:
        """Wait until the core's inputs say that these workers are lost. Errors: ExecutorEndedError."""
        os.eventfd_write(self._wake, 1)
        if self._tell is None:
            raise ExecutorEndedError(crew.describe_end())
        crew.is_mourned.wait()
        if crew.is_final:
            raise ExecutorEndedError(self._last_words)

    def prepare_ahead(self) -> bool:
        """Return False: workers prepare later steps themselves."""
        return False

    def follow(self, tell: Callable[[ExecutorNews], None]) -> None:
        """Report losses to the core; see MortalExecutor."""
        self._tell = tell

    def go_on(self) -> None:
        """Send the next plans to the workers started last; see MortalExecutor."""
        before, self._serving = self._serving, self._restored.popleft()
        if self.shared_blocks is not None and (blocks := self._serving.blocks) is not None:
            replace_parts(self.shared_blocks, blocks)
        if self._feature_sender is not None:
            self._feature_sender.forget()
        before.end()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the current workers, stage after stage, by rank."""
        return [] if self._crew is None else self._crew.pids

    def forget_losses(self) -> None:
        """Forget all losses so far; for callers that kill workers to measure the effect."""
        self._losses = []

    def close(self) -> None:
        """End all workers, and stop the thread."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        if (starting := self._starting) is not None:
            starting.kill()
        self._thread.join()
        for crew in {self._serving, *self._restored}:
            crew.end()
        self._release()

    def _release(self) -> None:
        if self._nodes is not None:
            self._nodes.close()
        os.close(self._wake)

    # --- the thread ---

    def _watch(self) -> None:
        try:
            if self._nodes is not None:
                self._nodes.wait(_JOIN_S, lambda: self._is_closing)
            self._crew = Crew(self._config, self._places, self._nodes)
        except BaseException as error:
            self._error = error
            return
        finally:
            self._begun.set()
        while not self._is_closing and self._wait_for_death(self._crew):
            if self._tell is None:  # the start failed, or a test uses this executor alone
                self._crew.kill()
                self._sleep(None)
            elif not self._replace(self._crew, self._tell):
                self._sleep(None)

    def _wait_for_death(self, crew: Crew) -> bool:
        """Return True if a worker died, or all were killed because they hang; False if close() was called."""
        poller = select.poll()
        for fd in (*crew.ended_fds, self._wake):
            poller.register(fd, select.POLLIN)
        seen, still_s, looked_at = -1, 0.0, time.monotonic()
        while not self._is_closing:
            ready = dict(poller.poll(1000 * (_LOOK_S if crew.running else _IDLE_S)))
            if ready.keys() & set(crew.ended_fds) or crew.failure is not None:
                return True
            if self._wake in ready:
                os.eventfd_read(self._wake)
            now = time.monotonic()
            is_same = seen == crew.num_taken and len(crew.running) > 0 and not crew.is_waiting
            still_s = still_s + min(now - looked_at, _LOOK_S) if is_same else 0.0
            seen, looked_at = crew.num_taken, now
            if still_s and self._is_hung(crew, still_s):
                crew.print_stacks()
                return True
        return False

    def _is_hung(self, crew: Crew, still_s: float) -> bool:
        try:
            _, num_tokens = crew.running[0]
        except IndexError:  # it has ended in the meantime
            return False
        limit_s = self._clock.limit_s(num_tokens)
        if still_s <= limit_s:
            return False
        log.say(f"engine-core: a step of {num_tokens} tokens has not ended after {still_s:.1f} s; workers are killed")
        return True

    def _replace(self, crew: Crew, tell: Callable[[ExecutorNews], None]) -> bool:
        """Clean up workers of which one has died, and start others. Return False if the executor ends."""
        text = crew.describe_end()
        crew.kill()
        if self._is_last_loss():
            self._give_up(crew, text, tell)
            return False
        log.say(f"engine-core: {text}; the workers are restarted, and what they ran is recomputed")
        tell(ExecutorLost(text))
        crew.is_mourned.set()
        while not self._sleep(_BACKOFF_S[len(self._losses) - 1]):
            try:
                fresh = self._start_again()
            except (EngineCoreError, OSError) as error:
                log.say(f"engine-core: the workers could not be restarted: {error}")
                if self._is_last_loss():
                    self._give_up(crew, str(error), tell)
                    return False
                continue
            self._crew = fresh
            self._restored.append(fresh)
            tell(ExecutorRestored())
            log.say("engine-core: the workers are running again")
            return True
        return False

    def _is_last_loss(self) -> bool:
        """Count a loss. Return whether there were too many."""
        now = time.monotonic()
        self._losses = [*(before for before in self._losses if now - before < _LOSSES_S), now]
        return len(self._losses) >= MAX_LOSSES

    def _give_up(self, crew: Crew, text: str, tell: Callable[[ExecutorNews], None]) -> None:
        """End the executor: the step waiting for these workers raises, otherwise the core's next one."""
        self._last_words = f"the workers were lost {len(self._losses)} times within {_LOSSES_S:.0f} s; last: {text}"
        crew.is_final = True
        tell(ExecutorLost(self._last_words, is_final=True))
        crew.is_mourned.set()

    def _start_again(self) -> Crew:
        """Return workers that are ready for plans. Errors: OSError, EngineCoreError."""
        assert self._resolved is not None, "steps run before initialize_cache()"
        if self._nodes is not None:
            self._nodes.wait(None, lambda: self._is_closing)
        self._starting = fresh = Crew(self._config, self._places, self._nodes)
        try:
            if self._is_closing:
                raise EngineStartError("the executor is closed")
            info = fresh.load()
            if info.fingerprint != self.info.fingerprint:
                raise EngineStartError(
                    f"the model has changed: its fingerprint was {self.info.fingerprint:.16} and is now "
                    f"{info.fingerprint:.16}"
                )
            fresh.allocate(self._resolved)
            self._clock = StepClock(fresh.warm_up())
        except BaseException:
            fresh.end()
            raise
        finally:
            self._starting = None
        return fresh

    def _sleep(self, seconds: float | None) -> bool:
        """Sleep, None = until close(). Return whether close() was called."""
        end = None if seconds is None else time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._is_closing:
            left = None if end is None else max(0.0, end - time.monotonic()) * 1000
            if poller.poll(left):
                os.eventfd_read(self._wake)
            elif left == 0:
                return False
        return True


def _sent_adapters(config: EngineConfig) -> "Adapters | None":
    if not config.enable_lora or config.executor != "local":
        return None
    # Imported here because only an engine with adapters needs it, and it takes time.
    from core.workers.sent_adapters import sent_adapters

    return sent_adapters(config)


class _Step(NamedTuple):
    """A step that was sent to the workers."""

    executor: WorkersExecutor
    crew: Crew
    step: int
    num_rows: int

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output, which has no tokens if the workers were lost."""
        return self.executor.take(self.crew, self.step, self.num_rows)


def create(config: EngineConfig) -> WorkersExecutor:
    """Create the executor for this config.

    Errors: ConfigError if so many workers cannot compute the model together, before one is started.
    """
    # Imported late: an engine with workers reads its model's settings, and runs none of its code.
    from core.model_files.parts import check_workers

    check_workers(config)
    if num_machines(config) > 1 and config.master_addr is None:
        raise ConfigError("distributed_executor_backend='ray' is for engines of LLM() and serve, whose owner asks Ray")
    return WorkersExecutor(config)
