"""Requests with drafts, right and wrong: streams, ends and blocks are those without; the executor reads every block."""

from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

from core.execution.encoding import decode_plan
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.inputs import EngineInput
from core.proposers.proposer import Proposals
from ipc.options.speculation import SpeculativeConfig
from ipc.tables.arrays import Ints
from ipc.wire.messages import Abort, FinishReason
from tests.columns import pack_numbers
from tests.core.driving import EOS, VOCAB_SIZE, Driver, PagedExecutor, add_message, expected_tokens, small_config
from tests.core.hostile_drafts import KINDS, Hostile, fake_oracle, speculative, use
from tests.core.test_several_tokens import MAX_LEN, messages
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.in_turn import in_turn

COUNT = 18  # requests


def run(kind: str | None, aborts: dict[int, int] | None = None, **options: Any) -> tuple[Driver, Hostile | None]:
    """kind: of the proposer; None: no drafts. aborts: step -> number. Two requests arrive in a step."""
    settings = None if kind is None else speculative()
    config = small_config(
        max_model_len=MAX_LEN, executor_options=fake_options(eos_token_id=EOS), speculative_config=settings, **options
    )
    driver, pending, step = Driver(config), messages(COUNT), 0
    hostile = None if kind is None else use(driver.scheduler, kind, partial(fake_oracle, VOCAB_SIZE), VOCAB_SIZE)
    while pending:
        inbox: list[tuple[int, EngineInput]] = [(message.number % 3, message) for message in pending[:2]]
        if aborts and step in aborts:
            inbox += [(client, Abort(pack_numbers([aborts[step]]))) for client in range(3)]
        driver.step(inbox)
        pending, step = pending[2:], step + 1
    driver.drain()
    return driver, hostile


@lru_cache(4)
def plain_run(num_blocks: int, depth: int) -> Driver:
    return run(None, num_blocks=num_blocks, depth=depth, budget=48)[0]


@pytest.mark.parametrize(("kind", "num_blocks", "depth"), in_turn(KINDS, [25, 300], [1, 2]))
def test_streams_and_ends_are_those_without(num_blocks: int, depth: int, kind: str) -> None:
    """With 25 blocks nearly no draft finds room. Many ends are in the middle of a step's tokens."""
    drafting, _ = run(kind, num_blocks=num_blocks, depth=depth, budget=48)
    plain = plain_run(num_blocks, depth)
    for message in messages(COUNT):
        got, wanted = (driver.inbox.received[message.number % 3, message.number] for driver in (drafting, plain))
        assert got.tokens == wanted.tokens == expected_tokens(message, MAX_LEN)
        assert (got.finish, got.stop_token) == (wanted.finish, wanted.stop_token)
    stats = drafting.scheduler.stats
    assert stats.num_generation_tokens == plain.scheduler.stats.num_generation_tokens
    assert stats.num_draft_tokens >= stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)
    if num_blocks == 300:
        assert stats.num_drafts > 30
        assert (stats.num_accepted_tokens > 0) == (kind != "wrong")
        if kind in ("right", "long") and depth == 1:
            assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens  # some rows end within their drafts
            assert len(drafting.executor.plans) < 0.6 * len(plain.executor.plans)


@pytest.mark.parametrize(
    "options",
    [
        {"num_swap_blocks": 40, "preemption_mode": "swap", "num_blocks": 34},
        {"prefix_caching": False},
        {"scheduling_policy": "priority", "num_blocks": 40, "preemption_mode": "auto", "num_swap_blocks": 9},
        {"scheduling_policy": "fair", "fair_quantum": 4, "num_blocks": 40},
        {"enable_chunked_prefill": False, "budget": 96},
        {"block_size": 1, "num_blocks": 500, "max_num_seqs": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_and_options(depth: int, options: dict[str, Any]) -> None:
    aborts = {step: 2 * step - 3 for step in range(4, 11, 2)}
    driver, hostile = run("random", aborts, depth=depth, **{"budget": 48, **options})
    assert hostile is not None
    assert driver.scheduler.stats.num_draft_tokens > 0
    num_aborted = 0
    for message in messages(COUNT):
        got, wanted = driver.inbox.received[message.number % 3, message.number], expected_tokens(message, MAX_LEN)
        num_aborted += got.finish == FinishReason.ABORT
        assert got.tokens == (wanted[: len(got.tokens)] if got.finish == FinishReason.ABORT else wanted)
    assert 0 < num_aborted <= len(aborts)


@pytest.mark.parametrize("depth", [1, 2])
def test_suffix_finds_the_outputs_of_earlier_requests(depth: int) -> None:
    """The fake executor's outputs are functions of the prompt, so an equal request has the output of the first."""
    settings = SpeculativeConfig(method="suffix", step_ns=(10**6,) * 8)
    config = small_config(
        max_model_len=MAX_LEN, executor_options=fake_options(eos_token_id=EOS), speculative_config=settings, depth=depth
    )
    driver, accepted = Driver(config), list[int]()
    for again in range(2):
        added = [add_message(n + 100 * again, range(n, n + 9), 40) for n in range(6)]
        driver.step([(0, message) for message in added])
        driver.drain()
        for message in added:
            assert driver.inbox.received[0, message.number].tokens == expected_tokens(message, MAX_LEN)
        accepted.append(driver.scheduler.stats.num_accepted_tokens)
    assert accepted[1] > accepted[0] + 50


class Sometimes(Hostile):
    """It finds drafts for some rows at a time, others each time."""

    def propose(self, rows: Ints, most: int) -> Proposals:
        found = super().propose(rows, most)
        found.counts[(rows + self.num_asked // 3) % 8 == 0] = 0
        return found


def test_rows_do_not_part_into_groups_that_take_turns() -> None:
    """Steps take as long with all of the drafts as without. While drafts are in flight no other row gets any, so that
    all rows meet again in the step behind the next."""
    config = small_config(
        max_model_len=MAX_LEN, speculative_config=speculative(3, (10**6,) * 8), depth=2, budget=64, max_num_seqs=8
    )
    driver = Driver(config)
    table = driver.scheduler.table
    driver.scheduler.speculation.proposers[:] = [Sometimes("right", fake_oracle(VOCAB_SIZE, table), VOCAB_SIZE)]
    added = [add_message(number, range(number, number + 9), 40) for number in range(8)]
    for got, message in zip(driver.run(*added), added, strict=True):
        assert got.tokens == expected_tokens(message, MAX_LEN)
    plans = [decode_plan(plan) for plan in driver.executor.plans]
    drafted = [bool(len(plan.num_draft_tokens)) for plan in plans]
    assert sum(drafted) > 5
    for before, plan, has_drafts, follows in zip(plans, plans[1:], drafted, drafted[1:], strict=False):
        if has_drafts and follows:
            back = np.concatenate([plan.rows, plan.removed_rows])
            assert np.isin(before.rows[before.num_draft_tokens > 0], back).all(), "the step between was empty"


def test_a_run_replays_to_the_same_plans() -> None:
    for kind in KINDS:
        first, second = (run(kind, num_blocks=60, depth=1)[0] for _ in range(2))
        assert first.executor.plans == second.executor.plans


class Offering(PagedExecutor):
    """An executor that proposes the right next tokens with its results, as one with a draft model does."""

    def sample(self, plan: SchedulerOutput, samples: Any) -> ModelRunnerOutput:
        output = super().sample(plan, samples)
        drafts = [self._next(row, 3) for row in plan.rows.tolist()]
        counts = np.full(len(plan.rows), 3, np.int32)
        fields = {"draft_counts": counts, "draft_token_ids": np.array(drafts, np.int32).reshape(-1)}
        return ModelRunnerOutput(output.step, output.token_ids, counts=output.counts, **fields)  # type: ignore[arg-type]

    def _next(self, row: int, count: int) -> list[int]:
        return fake_tokens(self.table.tokens.read(row, 0, int(self.table.num_tokens[row])).tolist(), count, VOCAB_SIZE)


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_that_the_executor_offers(depth: int) -> None:
    """They need no speculative_config, and end with the row's next token. Rows change hands meanwhile."""
    requests = [add_message(number, [number, 5, 6], 9 + number) for number in range(20)]
    config = small_config(200, max_num_seqs=4, depth=depth)
    driver, plain = Driver(config, executor=Offering), Driver(config)
    got, wanted = driver.run(*requests), plain.run(*requests)
    assert [one.tokens for one in got] == [one.tokens for one in wanted]
    stats = driver.scheduler.stats
    assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens > 100
    if depth == 1:
        assert len(driver.executor.plans) < 0.5 * len(plain.executor.plans)


def test_drafts_for_a_row_of_another_request_are_ignored() -> None:
    driver = Driver(small_config(60, max_num_seqs=1))
    driver.step([(0, add_message(1, [5, 6], 20))])
    scheduler, tokens = driver.scheduler, np.array([9, 9], np.int32)
    rows, stale = scheduler.running, scheduler.table.tenancy[scheduler.running] + 1
    scheduler.update_draft_token_ids(rows, stale, np.array([2]), tokens)
    driver.step()
    assert scheduler.stats.num_draft_tokens == 0
    scheduler.update_draft_token_ids(rows, scheduler.table.tenancy[rows], np.array([2]), tokens)
    driver.step()
    assert scheduler.stats.num_draft_tokens == 2
