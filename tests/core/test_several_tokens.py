"""Rows that yield several tokens in a step: streams, ends, preemption and prefix hits are those of one token a step."""

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from core.engine import EngineCore
from core.execution.plan import FAILED_TOKEN, ModelRunnerOutput, SchedulerOutput
from core.executors.fake import create, mix, next_token
from core.inputs import EngineInput
from ipc.wire.messages import Abort, AddRequest, FinishReason, Logprobs, Outputs
from tests.columns import pack_numbers
from tests.core.driving import EOS, VOCAB_SIZE, Driver, PagedExecutor, add_message, expected_tokens, small_config
from tests.core.test_step_cost import count_calls
from tests.fake_options import fake_options
from tests.in_turn import in_turn

MAX_LEN = 90
MOST = 5
SHARED = list(range(300, 330))


class Several(PagedExecutor):
    """Yields 1 to MOST tokens of a row that samples; the first is read from the blocks, as PagedExecutor's is."""

    def sample(self, plan: SchedulerOutput, samples: npt.NDArray[np.bool_]) -> ModelRunnerOutput:
        runs = [self._run(row) if it else [] for row, it in zip(plan.rows.tolist(), samples, strict=True)]
        token_ids = np.array([token for run in runs for token in run], np.int32)
        return ModelRunnerOutput(plan.step, token_ids, counts=np.array([len(run) for run in runs], np.int32))

    def _run(self, row: int) -> list[int]:
        run = [self.token(row)]
        self._append(row, max(run[0], 0))
        if run[0] == FAILED_TOKEN:
            return run
        count = 1 + int(mix(np.array([run[0]], np.uint64))[0] % np.uint64(MOST))
        while len(run) < count:
            end = int(self.table.num_tokens[row])
            sums, position = self._prefix_sums(row, end)[-1:], np.array([end], np.uint64)
            run.append(int(next_token(sums, position, self.seed[row : row + 1], self.info.vocab_size)[0]))
            self._append(row, run[-1])
        return run

    def _append(self, row: int, token: int) -> None:
        self.table.append_tokens(np.array([row]), np.array([token], np.int32))


def messages(count: int = 40) -> list[AddRequest]:
    """Stop tokens and EOS are a good part of the vocabulary: most runs end in the middle of a step's tokens."""
    rng = random.Random(5)
    made = []
    for number in range(count):
        max_tokens = rng.choice([1, 2, 5, 17, 30, None])
        min_tokens = min(rng.choice([0, 7, 12]), max_tokens or 12)
        stops = list(range(number, VOCAB_SIZE, 25)) if number % 3 == 0 else None
        options = {"stop_token_ids": stops, "temperature": number % 2, "seed": rng.getrandbits(64)}
        prompt = [*SHARED[: rng.randrange(30)], number, 9]
        made.append(
            add_message(number, prompt, max_tokens, ignore_eos=number % 2 == 0, min_tokens=min_tokens, **options)
        )
    return made


def run(executor: type[PagedExecutor], aborts: dict[int, int] | None = None, **options: Any) -> Driver:
    """aborts: step -> number. Two requests arrive in a step."""
    config = small_config(max_model_len=MAX_LEN, budget=24, executor_options=fake_options(eos_token_id=EOS), **options)
    driver, pending, step = Driver(config, executor=executor), messages(), 0
    while pending:
        inbox: list[tuple[int, EngineInput]] = [(message.number % 3, message) for message in pending[:2]]
        if aborts and step in aborts:
            inbox += [(client, Abort(pack_numbers([aborts[step]]))) for client in range(3)]
        driver.step(inbox)
        pending, step = pending[2:], step + 1
    driver.drain()
    return driver


@pytest.mark.parametrize(("num_blocks", "depth"), in_turn([25, 36, 300], [1, 2]))
def test_streams_and_ends_are_those_of_one_token_a_step(num_blocks: int, depth: int) -> None:
    several, one = (run(kind, num_blocks=num_blocks, depth=depth) for kind in (Several, PagedExecutor))
    for message in messages():
        got, wanted = (driver.inbox.received[message.number % 3, message.number] for driver in (several, one))
        assert got.tokens == wanted.tokens == expected_tokens(message, MAX_LEN)
        assert (got.finish, got.stop_token) == (wanted.finish, wanted.stop_token)
    stats = several.scheduler.stats
    assert (stats.num_preemptions > 0) == (num_blocks < 40)
    assert any(entry.cached for entry in several.inbox.received.values())
    assert stats.num_generation_tokens == sum(len(entry.tokens) for entry in several.inbox.received.values())
    assert len(several.executor.plans) < len(one.executor.plans) * (0.9 if num_blocks < 40 else 0.75)


@pytest.mark.parametrize("options", [{"num_swap_blocks": 40, "preemption_mode": "swap"}, {"prefix_caching": False}])
@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_swapping_and_no_prefix_cache(depth: int, options: dict[str, Any]) -> None:
    aborts = {step: 2 * step - 3 for step in range(5, 20, 3)}
    driver = run(Several, aborts, num_blocks=28, depth=depth, **options)
    num_aborted = 0
    for message in messages():
        got, wanted = driver.inbox.received[message.number % 3, message.number], expected_tokens(message, MAX_LEN)
        num_aborted += got.finish == FinishReason.ABORT
        assert got.tokens == (wanted[: len(got.tokens)] if got.finish == FinishReason.ABORT else wanted)
    assert 0 < num_aborted <= len(aborts)


#: By number, choice and kind ("row", "logprobs"): tokens and ends, or positions and their entries, in order.
Found = dict[tuple[int, int, str], list[Any]]


def outputs_of(most: int, depth: int, **options: Any) -> tuple[Found, int]:
    """(what the clients got, steps) of the fake executor."""
    config = small_config(
        60, depth=depth, budget=24, max_model_len=MAX_LEN, executor_options=fake_options(tokens_per_step=most)
    )
    engine, found, step = EngineCore(config, executor := create(config)), Found(), 0
    executor.initialize_cache(config)
    stops = list(range(0, VOCAB_SIZE, 20))
    options |= {"temperature": 1.0, "stop_token_ids": stops}
    pending = [add_message(n, [n, *range(11)], 9 + n, seed=n, **options) for n in range(9)]
    while pending or engine.has_work:
        replies = engine.step([(0, message) for message in pending[:1]], 0)
        engine.scheduler.check_integrity()
        pending, step = pending[1:], step + 1
        for _, reply in replies:
            assert isinstance(reply, Outputs)
            take_rows(reply, found)
            take_logprobs(reply, found)
    return found, step


def numbers_and_choices(message: Outputs | Logprobs) -> list[tuple[int, int]]:
    numbers = np.frombuffer(message.numbers, "<u4").tolist()
    choices = np.frombuffer(message.choices, "<u2").tolist() or [0] * len(numbers)
    return list(zip(numbers, choices, strict=True))


def take_rows(reply: Outputs, found: Found) -> None:
    keys, tokens = numbers_and_choices(reply), iter(np.frombuffer(reply.tokens, "<i4").tolist())
    finish, stopped = reply.finish or bytes(len(keys)), dict(reply.stop_tokens)
    for row, count in enumerate(np.frombuffer(reply.counts, "<u2").tolist()):
        entries = found.setdefault((*keys[row], "row"), [])
        entries += [next(tokens) for _ in range(count)]
        if finish[row]:
            entries.append((FinishReason(finish[row]), stopped.get(row)))
    assert next(tokens, None) is None


def take_logprobs(reply: Outputs, found: Found) -> None:
    if reply.logprobs is None:
        return
    positions = np.frombuffer(reply.logprobs.positions, "<u4").tolist()
    ends = [0, *np.frombuffer(reply.logprobs.counts, "<u4").cumsum().tolist()]
    for at, key in enumerate(numbers_and_choices(reply.logprobs)):
        part = slice(4 * ends[at], 4 * ends[at + 1])
        entry = positions[at], reply.logprobs.token_ids[part], reply.logprobs.values[part]
        found.setdefault((*key, "logprobs"), []).append(entry)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("options", [{"n": 3}, {"logprobs": 2}, {"n": 2, "logprobs": 1, "prompt_logprobs": 1}], ids=str)
def test_choices_and_log_probabilities_of_the_fake_executor(options: dict[str, int], depth: int) -> None:
    """Log probabilities of tokens after the end are dropped with them, and those of a row come in order."""
    (one, num_steps), (several, fewer) = (outputs_of(most, depth, **options) for most in (1, 6))
    assert several == one
    assert fewer < num_steps
    assert sum(len(entries) for entries in one.values()) > 100


def test_a_step_with_several_tokens_costs_the_same_for_16_and_256_rows() -> None:
    def calls(num_rows: int) -> list[int]:
        options = {"executor_options": fake_options(eos_token_id=2**20, tokens_per_step=3)}
        config = small_config(4000, 64, max_num_seqs=300, budget=2**14, max_model_len=1024, **options)
        engine = EngineCore(config, executor := create(config))
        executor.initialize_cache(config)
        requests = [add_message(number, [number, *range(10)], 500) for number in range(num_rows)]
        engine.step([(0, message) for message in requests], 0)
        return [count_calls(lambda: engine.step((), 0))[0] for _ in range(4)]

    assert calls(16) == calls(256)
