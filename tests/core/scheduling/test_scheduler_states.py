"""EngineCore under random clients, pools, budgets and depths: a hypothesis state machine.

After every step the scheduler recounts itself and the executor reads every context back through the block tables.
At the end all that is left drains, every request has exactly the tokens of the one-at-a-time oracle, all blocks have
come back, and the log of what was drained before each step replays to the same plans, byte for byte.
"""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from core.batch import kept_states
from core.batch.carried import Copies
from core.batch.kept_states import KeptStates
from core.execution.plan import SavedStates
from core.inputs import EngineInput
from core.scheduling import scheduler
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Ints, Rows
from ipc.wire.messages import Abort, AddRequest, ErrorCode, FinishReason, Goodbye, ResetPrefixCache
from tests.columns import pack_numbers
from tests.core.driving import EOS, ByHand, Driver, Received, add_message, expected_tokens, small_config
from tests.core.stateful_executor import StatefulExecutor
from tools.lab.check_scheduler.paged_executor import PagedExecutor

MS = 1_000_000  # ns
POISON = 999
#: Prompts begin with a part of one of these and so share blocks.
BASES = ([10] * 24, list(range(100, 124)), [*range(100, 110), *range(200, 214)])

configs = st.fixed_dictionaries(
    {
        "depth": st.sampled_from([1, 2]),
        "num_blocks": st.sampled_from([8, 12, 5, 20, 60]),
        "block_size": st.sampled_from([4, 2, 1]),
        "max_num_seqs": st.integers(1, 6),
        "budget": st.sampled_from([9, 40, 5, 2, 1]),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "preemption_mode": st.sampled_from(["swap", "recompute", "auto"]),
        "num_swap_blocks": st.sampled_from([20, 3]),
        "swap_ns_per_block": st.sampled_from([1, 3]),
        "num_host_blocks": st.sampled_from([0, 12, 3, 1]),
        "fair_quantum": st.sampled_from([4, 40]),
    }
)


def random_request(rng: random.Random, number: int, prefix: list[int], max_model_len: int) -> AddRequest:
    """Most are plain; about one in four has each uncommon option, one in sixteen is poisoned."""

    def sometimes(value: Any, otherwise: Any, one_in: int = 4) -> Any:
        return otherwise if rng.randrange(one_in) else value

    tail = [rng.choice([1, EOS, 3, rng.randrange(POISON)]) for _ in range(rng.randrange(1, 7))]
    prompt = [*prefix[: rng.choice([0, 3, 4, 8, 16, 24])], *tail, *sometimes([POISON], [], 16)]
    prompt = prompt[-(max_model_len - 1) :]
    max_tokens = rng.randrange(1, 25)

    def build(delivered: list[int] | None) -> AddRequest:
        return add_message(
            number,
            prompt,
            max_tokens,
            ignore_eos=is_stubborn,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            temperature=temperature,
            seed=seed,
            salt=salt,
            deadline_ms=deadline_ms,
            delivered=delivered,
            n=n,
        )

    is_stubborn = sometimes(False, True)
    stop_token_ids = sometimes(list(range(rng.randrange(8), 1000, 8)), None)
    min_tokens = sometimes(rng.randrange(max_tokens + 1), 0)
    temperature, seed = sometimes(1.0, 0.0), rng.getrandbits(64)
    n = sometimes(rng.randrange(2, 4), 1) if temperature else 1
    salt, deadline_ms = sometimes("salt", ""), sometimes(rng.randrange(1, 40), 0, 8)
    message = build(None)
    if rng.randrange(4) == 0:  # it comes back after a crash with some of its tokens, but without its end
        tokens = expected_tokens(message, max_model_len)
        is_stopped = len(tokens) < min(max_tokens, max_model_len - len(prompt))
        message = build(tokens[: rng.randrange(len(tokens) + 1 - is_stopped)])
    return message


class EngineMachine(RuleBasedStateMachine):
    executor: type[PagedExecutor] = PagedExecutor

    def config_of(self, config: dict[str, Any]) -> ResolvedConfig:
        return small_config(**config)

    @initialize(config=configs)
    def start(self, config: dict[str, Any]) -> None:
        if config["preemption_mode"] == "recompute":
            config["num_swap_blocks"] = 0
        if not config["prefix_caching"]:
            config["num_host_blocks"] = 0
        self.config = self.config_of(config)
        self.max_model_len = self.config.max_model_len or 0
        self.driver = Driver(self.config, POISON, self.executor)
        self.pending: list[tuple[int, EngineInput]] = []
        self.added: dict[tuple[int, int], tuple[AddRequest, int]] = {}  # -> (message, step clock at its arrival)
        self.aborted: set[tuple[int, int]] = set()
        self.gone: set[int] = set()
        self.num_choices = 0
        self.now = 0
        self.next_client = 3
        self.clients = [0, 1, 2]

    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 6))
    def add(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            client = rng.choice(self.clients)
            prefix = rng.choice(BASES)
            if self.added and rng.randrange(4) == 0:  # the next turn of a conversation
                earlier = self.added[rng.choice(sorted(self.added))][0]
                prompt = np.frombuffer(earlier.prompt_token_ids, "<i4").tolist()
                prefix = [*prompt, *expected_tokens(earlier, self.max_model_len)]
            message = random_request(rng, self.num_choices, prefix, self.max_model_len)
            self.num_choices += message.params.n  # choice c is booked as request number + c
            message = self.with_more(rng, msgspec.structs.replace(message, priority=rng.randrange(3)))
            self.added[client, message.number] = (message, -1)
            self.pending.append((client, message))

    def with_more(self, rng: random.Random, message: AddRequest) -> AddRequest:
        """Return the message, with pins in some classes."""
        return message

    @precondition(lambda self: self.added)
    @rule(data=st.data(), kind=st.sampled_from(["abort", "abort", "abort", "leave", "reset"]))
    def disturb(self, data: st.DataObject, kind: str) -> None:
        if kind == "abort":
            keys = data.draw(st.lists(st.sampled_from(sorted(self.added)), min_size=1, max_size=2))
            client = keys[0][0]
            numbers = [number for _, number in keys]  # those of other clients are unknown to this one
            if client not in self.gone:
                self.pending.append((client, Abort(pack_numbers(numbers))))
                self.aborted |= {(client, number) for number in numbers}
        elif kind == "leave":
            client = data.draw(st.sampled_from(self.clients))
            self.pending.append((client, Goodbye()))
            self.gone.add(client)
            self.clients[self.clients.index(client)] = self.next_client
            self.next_client += 1
        else:
            self.pending.append((0, ResetPrefixCache(1)))

    @rule(count=st.integers(1, 8), milliseconds=st.sampled_from([0, 0, 1]))
    def step(self, count: int, milliseconds: int) -> None:
        for _ in range(count):
            self.now += milliseconds * MS
            messages, self.pending = self.pending, []
            for client, message in messages:
                if isinstance(message, AddRequest):
                    self.added[client, message.number] = (message, self.now)
            self.driver.step(messages, self.now)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.step(1, 0)
        work = sum(len(message.prompt_token_ids) // 4 + 24 for message, _ in self.added.values())
        self.driver.drain(limit=20 + 4 * work, now_ns=self.now)
        for (client, number), (message, arrival) in self.added.items():
            choices = [self.driver.inbox.received[client, number + choice] for choice in range(message.params.n)]
            self._check((client, number), message, arrival, choices)
        again = Driver(self.config, POISON, self.executor)
        for messages, now, replies in self.driver.log:
            assert again.engine.step(messages, now) == replies
        assert again.executor.plans == self.driver.executor.plans

    def _check(self, key: tuple[int, int], message: AddRequest, arrival: int, choices: list[Received]) -> None:
        prompt = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
        has_failed, is_poisoned = choices[0].failed, []
        for choice, got in enumerate(choices):
            delivered = len(message.delivered[0]) // 4 if message.delivered and not choice else 0
            expected = expected_tokens(message, self.max_model_len, choice)
            computed = [*prompt, *expected[:-1]]
            is_poisoned.append(POISON in computed and delivered < len(expected))
            if is_poisoned[-1]:
                expected = expected[: max(delivered, computed.index(POISON) + 1 - len(prompt))]
            assert got.tokens == expected[: len(got.tokens)]
            if key[0] in self.gone:
                continue  # told or not, depending on when it went
            assert got.is_over or has_failed, f"{key}.{choice} was never ended"
            if got.finish == FinishReason.ABORT:
                assert key in self.aborted
            elif has_failed is None:
                assert got.tokens == expected
        if has_failed is not None and has_failed.code == ErrorCode.DEADLINE_EXCEEDED:
            assert message.deadline_ms
            assert arrival + message.deadline_ms * MS <= self.now
        elif key[0] not in self.gone and key not in self.aborted:
            assert (has_failed is not None and has_failed.code == ErrorCode.NUMERIC) == any(is_poisoned)


class RecurrentMachine(EngineMachine):
    """A model with recurrent layers, with few slots for kept states: each row's state is read back."""

    executor = StatefulExecutor
    num_copied = num_saved = 0

    def config_of(self, config: dict[str, Any]) -> ResolvedConfig:
        made = small_config(**config)
        num_slots = 1 + made.num_blocks_override % 7  # type: ignore[operator]
        sizes = {"kv_cache_memory_bytes": 2 * (made.max_num_seqs + num_slots), "swap_space_bytes": 6}
        return msgspec.structs.replace(made, **sizes)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            assert isinstance(self.driver.executor, StatefulExecutor)
            RecurrentMachine.num_copied += self.driver.executor.num_copied
            RecurrentMachine.num_saved += self.driver.executor.num_saved


def run(machine: type[EngineMachine], examples: int) -> None:
    """Play so many examples: always the same ones, and in a soak new ones."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            phases=[Phase.generate],  # shrinking takes minutes, in which nothing is printed
            report_multiple_bugs=False,
            max_examples=examples,
            stateful_step_count=20,
            derandomize=examples < 1_000,
            deadline=None,
            database=None,
        ),
    )


@pytest.mark.parametrize("examples", [8, pytest.param(1_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_engine_survives_random_clients(examples: int) -> None:
    run(EngineMachine, examples)


@pytest.mark.parametrize("examples", [8, pytest.param(1_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_rows_have_their_own_recurrent_states(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_states_of_short_prompts(monkeypatch)
    run(RecurrentMachine, examples)
    assert RecurrentMachine.num_copied > 9
    assert RecurrentMachine.num_saved > 99


def keep_states_of_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((kept_states, "LEAST_TOKENS", 3), (scheduler, "LEAST_TOKENS", 3)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(kept_states, "_LEAST_DISTANCE", 8)


@pytest.mark.parametrize("fault", ["late", "of another"])
def test_a_planted_state_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_states_of_short_prompts(monkeypatch)
    save, add = KeptStates.save, Copies.add

    def late(self: KeptStates, rows: Rows, counts: Ints) -> SavedStates | None:
        saved = save(self, rows, counts)
        return None if saved is None else saved._replace(after=np.maximum(saved.after - 1, 1))

    if fault == "late":
        monkeypatch.setattr(KeptStates, "save", late)
    else:
        monkeypatch.setattr(Copies, "add", lambda self, source, target: add(self, source - 1, target))
    with pytest.raises(AssertionError, match="its state is not of"):
        run(RecurrentMachine, 20)


def test_rows_that_wait_for_a_step_of_prompts_are_skipped() -> None:
    hand = ByHand(small_config(100, 4, budget=64, max_model_len=60, enable_chunked_prefill=False))
    hand.add(add_message(0, [1], 20))
    hand.add(add_message(1, [1, 2], 20))
    hand.step()
    hand.step()
    assert hand.scheduler.stats.num_skipped == 0
    hand.add(add_message(2, [1, 2, 3], 20))
    assert list(hand.step()) == [2]
    assert hand.scheduler.stats.num_skipped == 2
    hand.step()
    assert hand.scheduler.stats.num_skipped == 2
