"""Plays random clients on the scheduler and on the gold model: equal decisions each step, nothing lost, all ends."""

import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from core.execution.plan import SchedulerOutput
from core.scheduling.decisions import Verdict
from ipc.options.config import EngineConfig
from ipc.options.workers import most_in_flight
from ipc.wire.messages import AddRequest, FinishReason, PauseMode
from tests.core.driving import EOS, ByHand, add_message, small_config
from tests.core.scheduling.gold_entry import Entry
from tests.core.scheduling.gold_options import GoldWithOptions
from tests.core.scheduling.gold_scheduler import Gold

MS = 1_000_000  # ns
Options = Mapping[str, Sequence[Any]]  # the values of which one is drawn

#: All that Gold knows.
PLAIN: Options = {
    "depth": [1, 2],
    "stages": [1, 1, 2, 3],
    "num_blocks": [12, 8, 5, 20, 60],
    "block_size": [4, 2, 1],
    "max_num_seqs": range(1, 7),
    "budget": [40, 9, 5, 2, 1],
    "prefix_caching": [True, True, False],
    "scheduling_policy": ["fcfs", "priority", "fair"],
    "priority_aging_seconds": [0.0, 0.012, 0.003],
    "fair_quantum": [4, 0, 40],
    "kv_window": [0, 0, 1, 5, 9],
    "watermark": [0.0],
    "admission_lookahead": [0],
}
ALL: Options = {
    **PLAIN,
    "preemption_mode": ["recompute", "swap", "auto", "by_choices"],
    "num_swap_blocks": [12, 3, 0],
    "swap_ns_per_block": [1, 3],
    "recompute_ns_per_token": [1, 2],
    "watermark": [0.0, 0.0, 0.1],
    "admission_lookahead": [8, 0, 1, 3],
    "reserve_full_length": [False, False, False, True],
    "long_prefill_token_threshold": [0, 0, 3],
    "max_num_partial_prefills": [0, 0, 1, 2],
    "enable_chunked_prefill": [True, True, True, False],
    "scheduler_delay_factor": [0.0, 0.0, 1.5],
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


class GoldMachine:
    """One example: what `rng` draws, played on both. Subclasses say the gold model, the options, and the hand."""

    gold_class: type[Gold]
    options: Options
    more_rules: Sequence[Callable[[], None]] = ()
    num_steps = 0  # compared, of all examples of the class
    patience: int | None = None  # steps at the end after which a client aborts a request before each step; None: never

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.most_entries = rng.choice([4, 10, 30])  # many short examples meet more combinations of options
        self.begin({name: rng.choice(values) for name, values in self.options.items()})

    def begin(self, options: dict[str, Any]) -> None:
        self.config = config_of(options)
        self.hand, self.gold = self.hand_of(self.config), self.gold_class(self.config)
        self.scheduler = self.hand.scheduler
        self.flight: deque[SchedulerOutput] = deque()
        self.now = 0
        self.entries: dict[int, Entry] = {}
        self.tenants: dict[str, int] = {}  # their numbers
        self.live: dict[int, Entry] = {}

    def hand_of(self, config: EngineConfig) -> ByHand:
        return ByHand(config)

    def play(self, num_rules: int = 20) -> None:
        """Follow so many rules, then let everything end. Which kinds of rules there are is drawn first."""
        rng = self.rng
        some: list[Callable[[], None]] = [self.abort, self.control]
        rules = [self.add, self.steps, *rng.sample(some, rng.choice([0, 1, 2, 2])), *self.more_rules]
        for _ in range(num_rules):
            rng.choice(rules)()
        self.end()

    def add(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(1, 6)):
            if len(self.entries) >= self.most_entries:
                return
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
            message = self.with_more(rng, msgspec.structs.replace(message, priority=priority, tenant=tenant))
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
            self.added(message, entries[0])

    def with_more(self, rng: random.Random, message: AddRequest) -> AddRequest:
        """The message with pins, or some number of choices; choice c is the gold model's entry number + c."""
        return message

    def added(self, message: AddRequest, entry: Entry) -> None:
        """The message has come, and was not refused; entry: its first one."""

    def add_to_gold(self, entries: list[Entry]) -> bool:
        """False: they never fit."""
        return self.gold.add(entries[0])

    def abort(self) -> None:
        if not self.live:
            return
        entry = self.live.pop(self.rng.choice(sorted(self.live)))
        choice = entry.choices.index(entry) if entry.choices else 0
        self.scheduler.finish_requests(entry.client, [entry.number - choice], [choice])
        self.gold.end(entry)

    def control(self) -> None:
        client = self.rng.randrange(3)
        match self.rng.choice(["pause new", "pause all", "resume", "forget", "weigh", "weigh"]):
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
                self.gold.forget()
            case _:
                self.scheduler.policy.set_weight(client, 1 + 1.5 * client)
                self.gold.policy.weights[client] = 1 + 1.5 * client

    def resume(self) -> None:
        self.scheduler.resume()
        self.gold.shut, self.gold.tokens = False, self.config.max_num_batched_tokens

    def steps(self) -> None:
        milliseconds = self.rng.choice([0, 1, 3])
        for _ in range(self.rng.randrange(1, 9)):
            self.now += milliseconds * MS
            self.step()

    def step(self) -> None:
        type(self).num_steps += 1
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

    def end(self) -> None:
        """All requests end, and have the tokens that they should have."""
        self.resume()
        bound = 50 + 50 * sum(entry.max_total for entry in self.live.values())  # a token may cost all before it again
        for number in range(bound):
            if not self.scheduler.has_unfinished_requests and not self.flight:
                break
            self.lose_patience(number)
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

    def lose_patience(self, num_steps: int) -> None:
        if self.patience is not None and num_steps > self.patience:
            self.abort()


def run(machine: type[GoldMachine], seeds: Iterable[int], patience: int | None = None) -> None:
    """Play the examples of these seeds; an error names its own. patience: see GoldMachine."""
    for seed in seeds:
        try:
            example = machine(random.Random(seed))
            example.patience = patience
            example.play()
        except BaseException as error:
            error.add_note(f"again: run({machine.__name__}, [{seed}], {patience})")
            raise


def run_share(machine: type[GoldMachine], count: int) -> None:
    """Play this many examples. One in eight goes to its end; the others' clients give up what still waits when no new
    request has come for 40 steps: most steps of an example with few blocks or tokens a step are of that kind.
    """
    run(machine, range(0, count, 8))
    run(machine, [seed for seed in range(count) if seed % 8], patience=40)


def new_seeds(share: float, most: int) -> range:
    """As many new seeds as a share of SCHEDULER_EXAMPLES, or of `most`; they begin with SCHEDULER_SEED."""
    count = round(share * int(os.environ.get("SCHEDULER_EXAMPLES", most)))
    first = int(os.environ.get("SCHEDULER_SEED", random.SystemRandom().randrange(10**12)))
    print(f"{count} seeds from {first} on")
    return range(first, first + count)
