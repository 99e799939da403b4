"""Plans: immutable, encodable, and all that an executor needs; depth 1 and depth 2 give the same tokens."""

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.executor import StepHandle
from core.execution.pipeline import Pipeline
from core.execution.plan import ModelRunnerOutput, NewRow, SchedulerOutput, encode_plan
from core.executors.fake import FakeExecutor, create
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.core.driving import Inbox, Received, add_message, expected_tokens, small_config


def int32s(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


PLAN = SchedulerOutput(
    step=2**40,
    removed_rows=int32s(4, 0),
    added=[
        NewRow(
            4, int32s(7, 8, 2**31 - 1), 2, 0, int32s(9), SamplingParams(stop=["x"], seed=3, max_tokens=None), 2**64 - 1
        ),
        NewRow(0, int32s(1), 1, 0, int32s(3), SamplingParams(temperature=0.0, stop_token_ids=[5]), 0),
    ],
    block_rows=int32s(1, 1, 2),
    block_ids=int32s(11, 12, 13),
    rows=int32s(1, 2, 4, 0),
    num_scheduled_tokens=int32s(1, 20, 3, 1),
)


def _decode_array(kind: object, value: bytes) -> np.ndarray:
    return np.frombuffer(value, "<i4").astype(np.int32, copy=False)


_decoder = msgspec.msgpack.Decoder(SchedulerOutput, dec_hook=_decode_array)


def decode_plan(data: bytes) -> SchedulerOutput:
    """The inverse of encode_plan(), as an executor in another process would have it."""
    return _decoder.decode(data)


def equal(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (SchedulerOutput, NewRow)):
        names = one.__struct_fields__
        return type(one) is type(other) and all(equal(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


def test_round_trip() -> None:
    again = decode_plan(encode_plan(PLAN))
    assert equal(PLAN, again)
    assert encode_plan(again) == encode_plan(PLAN)
    assert not equal(PLAN, decode_plan(encode_plan(msgspec.structs.replace(PLAN, rows=int32s(1, 2, 4, 3)))))
    assert (again.num_tokens, again.is_empty) == (25, False)


@pytest.mark.parametrize("later", [{}, {"top_n_sigma": 2.0}, {"xtc_probability": 0.5}, {"xtc_threshold": 0.2}])
def test_parameters_that_came_later_leave_the_bytes_of_plans_without_them(later: dict[str, float]) -> None:
    """The digests of plans are in captures, which later versions replay."""
    new = NewRow(0, int32s(1), 1, 0, int32s(3), SamplingParams(temperature=0.5, **later), 0)
    plan = msgspec.structs.replace(PLAN, added=[new])
    params = msgspec.msgpack.decode(encode_plan(plan))[2][0][5]
    fields = SamplingParams.__struct_fields__
    assert len(params) == (fields.index(next(iter(later))) if later else fields.index("skip_clone")) + 1
    assert decode_plan(encode_plan(plan)).added[0].params == new.params


def test_an_empty_plan() -> None:
    empty = SchedulerOutput(3, int32s(1), [], int32s(), int32s(), int32s(), int32s())
    assert empty.is_empty
    assert empty.num_tokens == 0
    assert equal(decode_plan(encode_plan(empty)), empty)


def test_a_plan_is_frozen_and_holds_int32_only() -> None:
    with pytest.raises(AttributeError):
        PLAN.step = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="int32 columns, not ndarray"):
        encode_plan(msgspec.structs.replace(PLAN, rows=np.array([1])))


def test_bytes_that_are_no_plan_are_refused() -> None:
    for data in (b"", b"\xc0", encode_plan(PLAN)[:-1]):
        with pytest.raises(msgspec.DecodeError):
            decode_plan(data)


class Remote:
    """A fake executor that is told everything as bytes, as one in another process would be, and answers late."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor: FakeExecutor = create(config)
        self._executor.initialize_cache(config)
        self.info = self._executor.info
        self.num_begun = 0
        self.num_done = 0

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        self.num_begun += 1
        return _Late(self, self._executor, encode_plan(plan))

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        raise AssertionError("the config is resolved")

    def initialize_cache(self, config: EngineConfig) -> None:
        raise AssertionError("the config is resolved")

    def close(self) -> None:
        self._executor.close()


class _Late:
    """Runs its plan when its result is asked for."""

    def __init__(self, remote: Remote, executor: FakeExecutor, data: bytes) -> None:
        self._remote = remote
        self._executor = executor
        self._data = data

    def result(self) -> ModelRunnerOutput:
        self._remote.num_done += 1
        return self._executor.execute(decode_plan(self._data)).result()


def requests() -> list[AddRequest]:
    shared = list(range(300, 330))
    return [
        add_message(
            number,
            [*shared[: 5 * number % 31], number, 9],
            1 + 7 * number % 23,
            temperature=number % 2,
            seed=2**64 - 1 - number,
            stop_token_ids=list(range(number, 1000, 40)) if number % 3 == 0 else None,
        )
        for number in range(24)
    ]


def run_remote(num_blocks: int, depth: int) -> dict[tuple[int, int], Received]:
    config = small_config(num_blocks, depth=depth, budget=24, max_model_len=60)
    engine = EngineCore(config, remote := Remote(config))
    inbox = Inbox()
    pending = [(message.number % 3, message) for message in requests()]
    for client, message in pending:
        inbox.expect(client, message)
    while pending or engine.has_work:
        now, pending = pending[:2], pending[2:]
        inbox.take(engine.step(now, 0))
        assert remote.num_begun - remote.num_done == engine.pipeline.num_in_flight <= depth - 1
    return inbox.received


@pytest.mark.parametrize("num_blocks", [16, 26, 200])
def test_decoded_plans_give_the_oracles_tokens_at_any_depth(num_blocks: int) -> None:
    at_depth_1, at_depth_2 = run_remote(num_blocks, 1), run_remote(num_blocks, 2)
    for message in requests():
        entry = at_depth_1[message.number % 3, message.number]
        assert entry.tokens == expected_tokens(message, 60)
        other = at_depth_2[message.number % 3, message.number]
        assert (other.tokens, other.finish, other.stop_token) == (entry.tokens, entry.finish, entry.stop_token)


def test_pipeline_waits_when_it_is_full_or_has_nothing_to_begin() -> None:
    config = small_config()
    remote = Remote(config)
    pipeline = Pipeline(remote, depth=2)
    empty = SchedulerOutput(0, int32s(), [], int32s(), int32s(), int32s(), int32s())
    assert pipeline.execute(empty) is None
    new = NewRow(0, int32s(5), 1, 0, int32s(1), SamplingParams(), 0)
    first = SchedulerOutput(0, int32s(), [new], int32s(), int32s(), int32s(0), int32s(1))
    second = SchedulerOutput(1, int32s(), [], int32s(), int32s(), int32s(0), int32s(1))
    assert pipeline.execute(first) is None
    assert pipeline.num_in_flight == 1
    done = pipeline.execute(second)
    assert done is not None
    assert (done[0], done[1].step, pipeline.num_in_flight) == (first, 0, 1)
    done = pipeline.execute(empty)
    assert done is not None
    assert (done[1].step, pipeline.num_in_flight) == (1, 0)
