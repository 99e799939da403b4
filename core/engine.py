"""EngineCore: the step, a pure function of its state, the messages drained before it and its clock value."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from core.batch.request import requests_from_message
from core.execution.executor import Executor, ExecutorEndedError
from core.execution.pipeline import Pipeline, StepWatcher
from core.inputs import (
    BlocksArrived,
    BlocksFound,
    BlocksStored,
    EndPause,
    EngineInput,
    EngineReply,
    ExecutorLost,
    ExecutorRestored,
    HoldClient,
    NewWeights,
    ReleaseClient,
    RenewKVEvents,
    SetClientWeight,
    StoreNews,
)
from core.kv.event_feed import KVFeed
from core.kv.orders import Order
from core.scheduling.by_name import load_scheduler
from core.scheduling.explain import explain
from core.scheduling.pins.pin_calls import answer_pin_call
from ipc.options.resolved import ResolvedConfig
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.options.workers import most_in_flight
from ipc.tables.columns import unpack_choices, unpack_numbers
from ipc.wire.call import Call
from ipc.wire.fleet_messages import NO_FLEET, ChangeReplica, GetReplicas
from ipc.wire.messages import (
    Abort,
    AddRequest,
    CallDone,
    CallFailed,
    ErrorCode,
    GetStatistics,
    Goodbye,
    Pause,
    ResetPrefixCache,
    Resume,
    Statistics,
    Submission,
)
from ipc.wire.pin_messages import ForkPin, GetPins, ReleasePin
from ipc.wire.pooling_messages import AddPooling
from ipc.wire.scheduling_messages import Explain, FollowKVEvents, StopRequest, UnfollowKVEvents
from ipc.wire.weights_messages import GetWeights, Sleep, WakeUp, Weights, WeightsMark

NS_PER_MS = 1_000_000


class EngineCore:
    """One scheduler and one executor, driven step by step.

    It has no clock, no randomness and no sockets. The same inboxes and clock values give the same plans and messages.
    watchers: called for each step that runs.
    """

    def __init__(
        self, config: ResolvedConfig, executor: Executor, epoch: int = 0, watchers: Sequence[StepWatcher] = ()
    ) -> None:
        self._max_model_len = config.max_model_len
        self._whole_prompt_tasks = executor.info.whole_prompt_tasks
        self._kind_stride = executor.info.vocab_size if executor.info.num_token_kinds > 1 else 0
        info = executor.info
        self._first_weights = WeightsMark(0, info.fingerprint, info.weights, info.variant)
        self._num_requests = 0
        self.scheduler = load_scheduler(config, executor.info, epoch)
        is_built_in = config.scheduler_cls == BUILT_IN_SCHEDULER
        self.scheduling_policy = config.scheduling_policy if is_built_in else config.scheduler_cls
        self.kv_feed = KVFeed(self.scheduler.pool.names, epoch)
        self.pipeline = Pipeline(executor, depth=most_in_flight(config), watchers=watchers)

    @property
    def has_work(self) -> bool:
        """Return whether a step can do anything. If not, only a message or a deadline can change that."""
        exchange = self.scheduler.exchange
        is_freeing = exchange is not None and exchange.is_freeing
        is_updating = self.scheduler.weights.is_due
        return self.scheduler.has_work or self.pipeline.num_in_flight > 0 or is_freeing or is_updating

    @property
    def has_unfinished(self) -> bool:
        """Return whether any request is live or any step is in flight. Requests of clients on hold count."""
        if self.scheduler.weights.pending is not None:
            return True
        return self.scheduler.has_unfinished_requests or self.pipeline.num_in_flight > 0

    def count_waiting(self) -> tuple[int, int]:
        """Return (number of requests without a row, number of their tokens).

        They have not started, or were preempted.
        """
        return len(self.scheduler.waiting), self.scheduler.waiting.num_tokens

    def state(self) -> list[Any]:
        """Return everything that later steps depend on, except what the constructor got. It is not a copy."""
        return [self._num_requests, self.scheduler, self.kv_feed, self.pipeline.plans]

    def take_over(self, state: list[Any]) -> None:
        """Continue from the state of an engine that had the same config. Call this before the first step."""
        self._num_requests, self.scheduler, self.kv_feed, plans = state
        if (mark := self.scheduler.weights.mark) is not None:
            self.pipeline.use_weights(mark)
        self.pipeline.resume(plans)

    def step(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> list[tuple[int, EngineReply]]:
        """Take in (client, message) pairs, run one step, and return the (client, message) pairs to send."""
        if self.scheduler.exchange is not None:
            self.scheduler.exchange.begin_step(now_ns)
        replies = self._receive(inbox, now_ns)
        if self.scheduler.weights.is_due and not self.pipeline.num_in_flight:
            replies.append(self._update_weights())
            if self.scheduler.has_work:  # the answer is sent before the next step computes all rows from scratch
                return [*replies, *self.scheduler.take_outputs()]
        plan = self.scheduler.schedule(now_ns)
        done = self.pipeline.execute(plan)
        outputs = self.scheduler.update_from_output(*done) if done else self.scheduler.take_outputs()
        return [*replies, *outputs, *self.kv_feed.drain(plan.step)]

    def _receive(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> list[tuple[int, EngineReply]]:
        replies: list[tuple[int, EngineReply]] = []
        for client, message in inbox:
            match message:
                case AddRequest() | AddPooling():
                    self._add_request(client, message, now_ns)
                case Abort():
                    choices = unpack_choices(message.choices) if message.choices else None
                    self.scheduler.finish_requests(client, unpack_numbers(message.numbers), choices)
                case Goodbye():
                    self.scheduler.finish_client(client)
                    self.kv_feed.unfollow(client)
                case HoldClient():
                    self.scheduler.hold_client(client, now_ns)
                case ReleaseClient():
                    self._num_requests += self.scheduler.release_client(client, self._num_requests, now_ns)
                case EndPause():
                    self.scheduler.resume()
                case SetClientWeight(weight):
                    self.scheduler.set_weight(client, weight)
                case RenewKVEvents():
                    self.kv_feed.renew(client)
                case ExecutorLost(text, is_final):
                    if is_final:
                        raise ExecutorEndedError(text)
                    self.scheduler.lose_executor()
                case ExecutorRestored():
                    self.pipeline.go_on()
                    self.scheduler.restore_executor()
                case NewWeights():
                    self.scheduler.weights.begin(client, message)
                case BlocksFound() | BlocksArrived() | BlocksStored():
                    self._take_news(message)
                case Call():
                    replies.append((client, self._answer(client, message, now_ns)))
        return replies

    @property
    def weights(self) -> WeightsMark:
        """Return the weights in use."""
        return self.scheduler.weights.mark or self._first_weights

    def _update_weights(self) -> tuple[int, EngineReply]:
        """Change the weights, and return the answer to the call."""
        client, update = self.scheduler.weights.take()
        self.pipeline.use_weights(update.mark)
        self.scheduler.use_weights(update.mark)
        return client, Weights(update.call, update.mark)

    def _take_news(self, message: StoreNews) -> None:
        exchange = self.scheduler.exchange
        assert exchange is not None, f"{message}, but this engine has no store of blocks"
        match message:
            case BlocksFound():
                exchange.found(message)
            case BlocksArrived():
                exchange.arrived(message)
            case BlocksStored():
                exchange.stored(message)

    def take_orders(self) -> list[Order]:
        """Return the last step's orders to the KV block store beyond the host; empty if there is none."""
        exchange = self.scheduler.exchange
        return [] if exchange is None else exchange.take_orders()

    def _answer(self, client: int, message: Call, now_ns: int) -> EngineReply:
        answer = HANDLERS[type(message)](self, client, message, now_ns)
        return CallDone(message.call) if answer is None else answer

    def _add_request(self, client: int, message: Submission, now_ns: int) -> None:
        choices = requests_from_message(
            message, client, self._num_requests, self._max_model_len, self._whole_prompt_tasks, self._kind_stride
        )
        self._num_requests += len(choices)
        deadline_ns = now_ns + message.deadline_ms * NS_PER_MS if message.deadline_ms else 0
        self.scheduler.add_request(choices, now_ns, deadline_ns)

    def _wake_up(self, call: int) -> CallFailed | None:
        if reason := self.scheduler.wake_up():
            return CallFailed(call, ErrorCode.INVALID_ARGUMENT, reason)
        self.pipeline.wake_up()
        return None

    def _sleep(self, level: int) -> None:
        assert not self.pipeline.num_in_flight, "a step is in flight"
        self.scheduler.sleep(level)
        self.pipeline.sleep(level)

    def statistics(self, call: int, now_ns: int = 0) -> Statistics:
        """Return counters and gauges as the answer to this call. now_ns: the step's clock, in ns."""
        return msgspec.structs.replace(self.scheduler.make_stats(), call=call, engine_ns=now_ns)


def _no_fleet(call: int) -> CallFailed:
    return CallFailed(call, ErrorCode.INVALID_ARGUMENT, NO_FLEET)


#: The handler of each call that the border passes on. It returns the answer, or None, which means CallDone.
HANDLERS: dict[type[Call], Callable[[EngineCore, int, Any, int], EngineReply | None]] = {
    GetWeights: lambda engine, client, message, now_ns: Weights(
        message.call, engine.weights, engine.scheduler.weights.waits, engine.scheduler.weights.are_gone
    ),
    GetStatistics: lambda engine, client, message, now_ns: engine.statistics(message.call, now_ns),
    ResetPrefixCache: lambda engine, client, message, now_ns: engine.scheduler.reset_prefix_cache(),
    Pause: lambda engine, client, message, now_ns: engine.scheduler.pause(message.mode),
    Resume: lambda engine, client, message, now_ns: engine.scheduler.resume(),
    Explain: lambda engine, client, message, now_ns: explain(
        engine.scheduler, engine.scheduling_policy, client, message, now_ns
    ),
    FollowKVEvents: lambda engine, client, message, now_ns: engine.kv_feed.follow(client),
    UnfollowKVEvents: lambda engine, client, message, now_ns: engine.kv_feed.unfollow(client),
    StopRequest: lambda engine, client, message, now_ns: engine.scheduler.finish_requests(
        message.session, [message.number]
    ),
    Sleep: lambda engine, client, message, now_ns: engine._sleep(message.level),
    WakeUp: lambda engine, client, message, now_ns: engine._wake_up(message.call),
    **dict.fromkeys(
        (ReleasePin, ForkPin, GetPins),
        lambda engine, client, message, now_ns: answer_pin_call(engine.scheduler, message, now_ns),
    ),
    GetReplicas: lambda engine, client, message, now_ns: _no_fleet(message.call),
    ChangeReplica: lambda engine, client, message, now_ns: _no_fleet(message.call),
}
