"""The scheduler against the gold model: equal decisions after every step, nothing lost, everything ends."""

import os
import random
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from core.execution.plan import SchedulerOutput
from core.scheduling.decisions import Verdict
from ipc.config import EngineConfig
from ipc.messages import AddRequest, FinishReason, PauseMode
from ipc.workers import most_in_flight
from tests.core.driving import EOS, ByHand, add_message, small_config
from tests.core.scheduling.gold_entry import Entry
from tests.core.scheduling.gold_options import GoldWithOptions
from tests.core.scheduling.gold_scheduler import Gold

MS = 1_000_000  # ns

#: All that Gold knows.
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "depth": st.sampled_from([1, 2]),
    "stages": st.sampled_from([1, 1, 2, 3]),
    "num_blocks": st.sampled_from([12, 8, 5, 20, 60]),
    "block_size": st.sampled_from([4, 2, 1]),
    "max_num_seqs": st.integers(1, 6),
    "budget": st.sampled_from([40, 9, 5, 2, 1]),
    "prefix_caching": st.sampled_from([True, True, False]),
    "scheduling_policy": st.sampled_from(["fcfs", "priority", "fair"]),
    "priority_aging_seconds": st.sampled_from([0.0, 0.012, 0.003]),
    "fair_quantum": st.sampled_from([4, 0, 40]),
    "kv_window": st.sampled_from([0, 0, 1, 5, 9]),
    "watermark": st.just(0.0),
    "admission_lookahead": st.just(0),
}
PAGES = PLAIN | {
    "num_blocks": st.sampled_from([16, 12, 24, 60]),
    "max_model_len": st.sampled_from([20, 30, 60]),
    "kv_window": st.sampled_from([1, 5, 9]),
    "kv_page_blocks": st.sampled_from([1, 2, 3, 6]),
}
ALL = PLAIN | {
    "preemption_mode": st.sampled_from(["recompute", "swap", "auto"]),
    "num_swap_blocks": st.sampled_from([12, 3, 0]),
    "swap_ns_per_block": st.sampled_from([1, 3]),
    "recompute_ns_per_token": st.sampled_from([1, 2]),
    "watermark": st.sampled_from([0.0, 0.0, 0.1]),
    "admission_lookahead": st.sampled_from([8, 0, 1, 3]),
    "reserve_full_length": st.sampled_from([False, False, False, True]),
    "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
    "max_num_partial_prefills": st.sampled_from([0, 0, 1, 2]),
    "enable_chunked_prefill": st.sampled_from([True, True, True, False]),
    "scheduler_delay_factor": st.sampled_from([0.0, 0.0, 1.5]),
}


def config_of(options: dict[str, Any]) -> EngineConfig:
    if options.get("preemption_mode") == "recompute":
        options["num_swap_blocks"] = 0
    if not options.get("enable_chunked_prefill", True):
        options["long_prefill_token_threshold"] = 0
    return small_config(**options)


def sampled(number: int, position: int) -> int:
    """The token of a request at a position, whatever became of it before."""
    value = (number * 7919 + position * 104_729) % 97
    return EOS if value < 4 else 3 + value % 3


def decided_by(gold: Gold) -> dict[str, Any]:
    """Decisions of the last step; see GoldMachine.decided()."""
    copied, slots = (gold.copied, gold.slots) if isinstance(gold, GoldWithOptions) else (dict[Entry, int](), 0)
    counts = (gold.budget(), gold.b.free, len(gold.b.fenced), slots)
    return {
        "batch": [(r.number, r.n + len(r.drafts)) for r in gold.running if r.n],
        "started": [(q.number, q.computed - q.n) for q in gold.starts],
        "preempted": [(r.number, cause, copied.get(r, 0)) for r, cause in gold.preempted.items()],
        "refused": [(q.number, refusal) for q, refusal in gold.refused.items()],
        "left": (*counts, len(gold.waiting), gold.skipped),
    }


class GoldMachine(RuleBasedStateMachine):
    gold_class: type[Gold]

    def begin(self, config: EngineConfig) -> None:
        self.config = config
        self.hand, self.gold = ByHand(config), self.gold_class(config)
        self.scheduler = self.hand.scheduler
        self.flight: deque[SchedulerOutput] = deque()
        self.now = 0
        self.entries: dict[int, Entry] = {}
        self.tenants: dict[str, int] = {}  # their numbers
        self.live: dict[int, Entry] = {}

    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5))
    def add(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            number, most = len(self.entries), self.config.max_model_len or 0
            prefix = rng.choice([[10] * 24, list(range(100, 124))])
            if self.entries and rng.randrange(3) == 0:
                prefix = self.entries[rng.randrange(number)].tokens
            prompt = [
                *prefix[: rng.choice([0, 3, 4, 8, 16, 24])],
                *(rng.randrange(3, 9) for _ in range(rng.randrange(1, 6))),
            ]
            prompt = prompt[: most - 1]
            max_tokens, eos = rng.randrange(1, 25), rng.choice([EOS, -1])
            client, priority, salt = rng.randrange(3), rng.randrange(-1, 2), rng.choice(["", "", "", "salt"])
            tenant = rng.choice(["", "", "", "salt", "b"])
            message = add_message(number, prompt, max_tokens, ignore_eos=eos < 0, salt=salt)
            message = self.with_choices(rng, msgspec.structs.replace(message, priority=priority, tenant=tenant))
            party = self.tenants.get(tenant, -1 - len(self.tenants)) if tenant else client
            longest = min(len(prompt) + max_tokens, most)
            entries = [
                Entry(n, client, n, priority, self.now, list(prompt), longest, f"{tenant}/{salt}", eos, party)
                for n in range(number, number + message.params.n)
            ]
            received = self.hand.add(message, client, now_ns=self.now)
            self.hand.flush()
            assert self.add_to_gold(entries) == (received.failed is None)
            if received.failed is not None:
                self.entries[number] = entries[0]
                continue
            if tenant:
                self.tenants[tenant] = party
            for entry, request in zip(entries, self.scheduler.find(client, number), strict=True):
                self.entries[entry.number] = self.live[entry.number] = entry
                entry.preemptions = rng.choice([0, 0, 0, 0, 7, 8])  # by chance so many take long to come about
                request.num_preemptions = entry.preemptions

    def with_choices(self, rng: random.Random, message: AddRequest) -> AddRequest:
        """The message with some number of choices; choice c of it is the gold model's entry number + c."""
        return message

    def add_to_gold(self, entries: list[Entry]) -> bool:
        """False: they never fit."""
        return self.gold.add(entries[0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        entry = self.live.pop(number)
        choice = entry.choices.index(entry) if entry.choices else 0
        self.scheduler.finish_requests(entry.client, [number - choice], [choice])
        self.gold.end(entry)

    @rule(
        kind=st.sampled_from(["pause new", "pause all", "resume", "forget", "weigh", "weigh"]), client=st.integers(0, 2)
    )
    def control(self, kind: str, client: int) -> None:
        match kind:
            case "pause new":
                self.scheduler.pause(PauseMode.NEW)
                self.gold.shut, self.gold.tokens = True, self.config.max_num_batched_tokens
            case "pause all":
                self.scheduler.pause(PauseMode.ALL)
                self.gold.shut, self.gold.tokens = True, 0
            case "resume":
                self.resume()
            case "forget":
                self.scheduler.reset_prefix_cache()
                self.gold.b.forget()
            case _:
                self.scheduler.policy.set_weight(client, 1 + 1.5 * client)
                self.gold.policy.weights[client] = 1 + 1.5 * client

    def resume(self) -> None:
        self.scheduler.resume()
        self.gold.shut, self.gold.tokens = False, self.config.max_num_batched_tokens

    @rule(count=st.integers(1, 8), milliseconds=st.sampled_from([0, 1, 3]))
    def steps(self, count: int, milliseconds: int) -> None:
        for _ in range(count):
            self.now += milliseconds * MS
            self.step()

    def step(self) -> None:
        plan = self.hand.schedule(self.now)
        self.gold.schedule(self.now)
        assert self.decided(plan) == decided_by(self.gold)
        self.check_bounds()
        if not plan.is_empty:
            self.flight.append(plan)
        if self.flight and (plan.is_empty or len(self.flight) == most_in_flight(self.config)):
            table = self.scheduler.table
            numbers, lengths = (table.number + table.choice).tolist(), table.num_tokens.tolist()
            self.hand.update(self.flight.popleft(), lambda row: sampled(numbers[row], lengths[row]))
            for number in self.gold.update(sampled):
                del self.live[number]
        assert self.scheduler.get_request_counts() == (len(self.gold.running), len(self.gold.waiting))

    def decided(self, plan: SchedulerOutput) -> dict[str, Any]:
        scheduler, decision = self.scheduler, self.scheduler.decision
        assert decision is not None
        table = scheduler.table
        numbers = (table.number + table.choice)[decision.rows].tolist()
        started = numbers[len(numbers) - decision.num_started :]
        swap_space, pool = scheduler.preemption.swap_space, scheduler.pool
        counts = (decision.budget, decision.num_free_blocks, pool.num_fenced, swap_space.num_free)
        return {
            "batch": list(zip(numbers, decision.counts.tolist(), strict=True)),
            "started": [(number, new.num_computed_tokens) for number, new in zip(started, plan.added, strict=True)],
            "preempted": [
                (p.request.number + p.request.choice, int(p.cause), p.num_swapped_blocks) for p in decision.preempted
            ],
            "refused": [
                (one.request.number + one.request.choice, Verdict(one.verdict).name) for one in decision.examined
            ],
            "left": (*counts, decision.num_waiting, decision.num_skipped),
        }

    def check_bounds(self) -> None:
        """A request is preempted at most 8 times within its level; then it starts with all that it can need."""
        for entry, cause in self.gold.preempted.items():
            others = {live.priority for live in self.gold.running + self.gold.waiting}
            assert entry.preemptions <= 8 or cause == 2 or others != {entry.priority}

    def teardown(self) -> None:
        if not hasattr(self, "hand"):
            return
        self.resume()
        bound = 50 + 50 * sum(entry.max_total for entry in self.live.values())  # a token may cost all before it again
        for _ in range(bound):
            if not self.scheduler.has_unfinished_requests and not self.flight:
                break
            self.step()
        assert not self.live, f"{sorted(self.live)} have not ended after {bound} steps"
        pool = self.scheduler.pool
        assert (pool.num_free, pool.num_fenced) == (pool.num_blocks - 1, 0)
        assert self.scheduler.preemption.swap_space.num_free == self.config.num_swap_blocks
        assert self.scheduler.waiting.num_tokens == 0
        self.hand.flush()
        for number, entry in self.entries.items():
            received = self.hand.inbox.received[entry.client, number]
            assert received.is_over
            first = len(entry.tokens) - len(received.tokens)
            assert received.tokens == [sampled(number, position) for position in range(first, len(entry.tokens))]
            if received.finish == FinishReason.LENGTH:
                assert len(entry.tokens) == entry.max_total


class PlainMachine(GoldMachine):
    gold_class = Gold

    @initialize(options=st.fixed_dictionaries(PLAIN))
    def start(self, options: dict[str, Any]) -> None:
        self.begin(config_of(options))


class PagesMachine(GoldMachine):
    gold_class = Gold

    @initialize(options=st.fixed_dictionaries(PAGES))
    def start(self, options: dict[str, Any]) -> None:
        self.begin(config_of(options))

    def check_bounds(self) -> None:
        """There is no bound: who starts with all blocks gives some back, and needs others."""


class OptionsMachine(GoldMachine):
    gold_class = GoldWithOptions

    @initialize(options=st.fixed_dictionaries(ALL))
    def start(self, options: dict[str, Any]) -> None:
        self.begin(config_of(options))


def run(machine: type[GoldMachine], max_examples: int, derandomize: bool) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            phases=[Phase.generate],  # shrinking takes minutes, and its end says little more
            report_multiple_bugs=False,
            max_examples=max_examples,
            stateful_step_count=20,
            derandomize=derandomize,
            deadline=None,
            database=None,
        ),
    )


@pytest.mark.timeout(400)
def test_decisions_equal_the_gold_models() -> None:
    run(PlainMachine, 50, True)  # make soak runs tens of thousands


@pytest.mark.timeout(400)
def test_decisions_with_pages_equal_the_gold_models() -> None:
    run(PagesMachine, 25, True)


@pytest.mark.timeout(400)
def test_decisions_under_all_options_equal_the_gold_models() -> None:
    run(OptionsMachine, 35, True)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("machine", "share"),
    [(PlainMachine, 1 / 3), (OptionsMachine, 1 / 2), (PagesMachine, 1 / 6)],
    ids=["plain", "options", "pages"],
)
def test_soak_decisions_equal_the_gold_models(machine: type[GoldMachine], share: float) -> None:
    """100,000 examples in all; SCHEDULER_EXAMPLES=n runs that many."""
    run(machine, round(share * int(os.environ.get("SCHEDULER_EXAMPLES", "100000"))), False)
