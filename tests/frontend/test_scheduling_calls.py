"""What a client makes of the scheduler's news: metrics of requests, streams over a cut."""

import pytest

from frontend.client.client import EngineClient
from frontend.llm import LLM
from ipc.errors import EngineDeadError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.kv_events import KVBlocksCleared
from ipc.wire.messages import CallDone
from ipc.wire.scheduling_messages import EventKind, FollowKVEvents, KVEvents, UnfollowKVEvents
from tests.fake_options import fake_options
from tests.frontend.conftest import PlayedEngine


def test_metrics_of_requests_that_waited_and_were_preempted() -> None:
    with LLM(
        executor="fake",
        num_blocks_override=12,
        max_num_seqs=3,
        watermark=0.0,
        executor_options=fake_options(max_model_len=100),
    ) as llm:
        params = SamplingParams(max_tokens=80, ignore_eos=True, n=2)
        prompts = [{"prompt_token_ids": [number] * 5} for number in range(4)]  # one waits for a row
        outputs = llm.generate(prompts, params, use_tqdm=False)
        all_metrics = [output.metrics for output in outputs]
        assert sum(metrics.num_preemptions for metrics in all_metrics) == llm.client.statistics().num_preemptions > 0
        for metrics in all_metrics:
            assert metrics.time_in_queue is not None
            assert metrics.first_scheduled_time == metrics.arrival_time + metrics.time_in_queue
            assert metrics.arrival_time <= metrics.first_scheduled_time < metrics.last_token_time
            kinds = [(event.choice, event.kind) for event in metrics.events]
            assert {(0, EventKind.QUEUED), (0, EventKind.SCHEDULED), (1, EventKind.SCHEDULED)} <= set(kinds)
            resumed = sum(kind is EventKind.RESUMED for _, kind in kinds)
            assert resumed == metrics.num_preemptions
        assert max(metrics.time_in_queue or 0 for metrics in all_metrics) > 0


def following(played_engine: PlayedEngine) -> EngineClient:
    for kind in (FollowKVEvents, UnfollowKVEvents):
        played_engine.answers[kind] = lambda message: CallDone(message.call)  # type: ignore[union-attr]
    return EngineClient(played_engine)


def test_a_stream_goes_on_after_a_cut(played_engine: PlayedEngine) -> None:
    client = following(played_engine)
    stream = client.follow_kv_events()
    first, second = KVEvents(1, 0, 0, [KVBlocksCleared()]), KVEvents(1, 5, 0, [KVBlocksCleared()])
    played_engine.give(first)
    played_engine.cut()
    assert len(played_engine.sent(FollowKVEvents)) == 2
    played_engine.give(second)
    assert (next(stream), next(stream), stream.get(0)) == (first, second, None)
    stream.close()
    stream.close()
    assert len(played_engine.sent(UnfollowKVEvents)) == 1
    played_engine.cut()
    played_engine.give(second)
    assert len(played_engine.sent(FollowKVEvents)) == 2
    assert stream.get(0) is None
    client.close()


def test_a_second_stream_ends_the_first(played_engine: PlayedEngine) -> None:
    client = following(played_engine)
    first = client.follow_kv_events()
    second = client.follow_kv_events()
    assert (first.is_open, second.is_open) == (False, True)
    client.close()
    with pytest.raises(EngineDeadError):
        second.get()
