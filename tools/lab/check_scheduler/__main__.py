"""`engine-core check-scheduler`: check a scheduler, usually a plug-in's, with random clients in this process.

Each example draws options and traffic, as the tests of the built-in scheduler do. The executor keeps what a KV cache
would hold and reads every context back through the blocks, so a block that is lost, shared wrongly or given away too
early is found. The examples of one number are the same at each call.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from core.engine import EngineCore
from core.execution.executor import Executor
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.executors.fake import FakeExecutor, choice_seed, next_token
from core.inputs import EngineInput, EngineReply, ExecutorLost, ExecutorRestored, HoldClient, ReleaseClient
from core.process.resolve import resolve
from core.scheduling.by_name import import_scheduler
from core.scheduling.interface import SchedulerInterface
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.options.resolved import ResolvedConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import (
    Abort,
    AddRequest,
    FinishReason,
    Goodbye,
    Outputs,
    Pause,
    PauseMode,
    RequestFailed,
    ResetPrefixCache,
    Resume,
)
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.lab.check_scheduler.paged_executor import PagedExecutor, prefix_sums

_NUM_EXAMPLES = 12
_VOCABULARY, _EOS = 1000, 2
_CLIENTS = 3
_MS = 1_000_000  # ns
_MEMORY_BYTES = 1 << 36  # of a machine that has room for all of this
_WORDS = {True: "ok", False: "FAILED", None: "refused"}

#: The values of which an example draws one each. prefixes: how many different beginnings prompts have.
_Drawn = Mapping[str, Sequence[Any]]
_ROOMY: _Drawn = {
    "num_blocks_override": [400],
    "block_size": [4, 2, 16],
    "max_num_seqs": [8, 3],
    "max_num_batched_tokens": [64, 256],
    "enable_prefix_caching": [False],
}
_SCARCE: _Drawn = {
    "num_blocks_override": [8, 12, 20],
    "block_size": [4, 2],
    "max_num_seqs": [1, 3, 6],
    "max_num_batched_tokens": [40, 9, 5, 2],
    "enable_prefix_caching": [True, False],
    "watermark": [0.0, 0.1],
}
_OPTIONS: _Drawn = {
    **_SCARCE,
    "async_scheduling": [False, True],
    "scheduling_policy": ["fcfs", "priority", "fair"],
    "preemption_mode": ["recompute", "swap", "auto"],
    "num_swap_blocks": [12, 3],
    "admission_lookahead": [8, 0, 1],
    "reserve_full_length": [False, True],
    "long_prefill_token_threshold": [0, 3],
    "max_num_partial_prefills": [0, 1],
    "scheduler_delay_factor": [0.0, 1.5],
}


class _Check(NamedTuple):
    options: _Drawn
    acts: tuple[str, ...] = ()  # what clients do in addition to sending requests
    choices: tuple[int, ...] = (1,)  # of a request


_CHECKS = {
    "room for all": _Check(_ROOMY),
    "too few blocks": _Check(_SCARCE),
    "two steps at once": _Check({**_SCARCE, "async_scheduling": [True]}),
    "aborts": _Check({**_SCARCE, "async_scheduling": [False, True]}, ("abort", "goodbye")),
    "pauses and holds": _Check({**_SCARCE, "async_scheduling": [False, True]}, ("pause", "hold", "reset")),
    "a lost executor": _Check(_SCARCE, ("lose",)),
    "several choices": _Check(_SCARCE, ("abort",), (1, 2, 3)),
    "options": _Check(_OPTIONS, ("abort", "hold", "pause")),
}


class BrokenContractError(Exception):
    """The scheduler broke its contract; the text says how, with the numbers."""


class Finding(NamedTuple):
    """The outcome of one check. is_right: None if the scheduler refused the options of all examples."""

    name: str
    is_right: bool | None
    text: str


def main(arguments: Sequence[str]) -> int:
    """Print a line for each check, and return the exit status: 1 if one failed.

    Errors: ConfigError; those of check_scheduler().
    """
    parser = ArgumentParser(
        prog="engine-core check-scheduler",
        usage="engine-core check-scheduler NAME [--examples N] [OPTION ...]",
        description="Check that a scheduler follows the contract of docs/schedulers.md; for a plug-in's CI.",
    )
    parser.add_argument("name", metavar="NAME", help="the scheduler: an installed plug-in's, MODULE:NAME, or default")
    parser.add_argument("--examples", type=int, default=_NUM_EXAMPLES, metavar="N", help="default: %(default)s")
    add_engine_options(parser)
    parsed = parser.parse_args(arguments)
    if not 1 <= parsed.examples <= 2**20:
        parser.error("--examples must be from 1 to 1048576")
    given = {**engine_options(parsed), "executor": "fake", "scheduler_cls": parsed.name}
    num_failed = 0
    for finding in check_scheduler(config_from_options(**given), parsed.examples):
        print(f"{_WORDS[finding.is_right]:>7}  {finding.name}: {finding.text}", flush=True)
        num_failed += finding.is_right is False
    print(f"scheduler {parsed.name}: " + (f"{num_failed} of its checks failed" if num_failed else "every check passed"))
    return 1 if num_failed else 0


def check_scheduler(config: EngineConfig, num_examples: int) -> Iterator[Finding]:
    """Yield the outcome of each check of the scheduler that the config names.

    config: its sizes are replaced, and what an example draws. Errors: those of a scheduler that cannot be created or
    that raises anything but AssertionError.
    """
    import_scheduler(config)
    yield _interface(config)
    for name, check in _CHECKS.items():
        yield _finding(name, check, config, num_examples)


def _interface(config: EngineConfig) -> Finding:
    """Check that the scheduler has every name of the interface."""
    scheduler = _Example(config, _CHECKS["room for all"], 0).engine.scheduler
    names = [*SchedulerInterface.__annotations__, *vars(SchedulerInterface)]
    missing = [name for name in names if not name.startswith("_") and not hasattr(scheduler, name)]
    text = f"no {', '.join(missing)}" if missing else type(scheduler).__qualname__
    return Finding("interface", not missing, text)


def _finding(name: str, check: _Check, config: EngineConfig, num_examples: int) -> Finding:
    """Play the examples of one check; the first of four is played twice and must make the same plans."""
    num_tokens = num_steps = num_preemptions = num_refused = 0
    refusal = ""
    for seed in range(num_examples):
        try:
            example = _Example(config, check, seed)
        except ConfigError as error:
            num_refused, refusal = num_refused + 1, str(error)
            continue
        try:
            example.play()
            if seed % 4 == 0:
                again = _Example(config, check, seed)
                again.play()
                _expect(again.executor.plans == example.executor.plans, "the same inputs led to other plans")
        except (BrokenContractError, AssertionError) as error:
            return Finding(name, False, f"example {seed}: {error}")
        num_tokens += example.num_tokens
        num_steps += len(example.executor.plans)
        num_preemptions += example.engine.statistics(0).num_preemptions
    if num_refused == num_examples:
        return Finding(name, None, refusal)
    counts = f"{num_examples - num_refused} examples, {num_steps} steps, {num_tokens} tokens"
    return Finding(name, True, f"{counts}, {num_preemptions} preemptions")


def _expect(is_right: bool, text: str) -> None:
    if not is_right:
        raise BrokenContractError(text)


class _Received(msgspec.Struct):
    """What a client has of one choice of a request."""

    message: AddRequest
    choice: int
    tokens: list[int] = []
    is_over: bool = False
    is_wanted: bool = True  # not aborted


class _Example:
    """One engine with random clients. Errors: ConfigError if the scheduler does not support the drawn options."""

    def __init__(self, config: EngineConfig, check: _Check, seed: int) -> None:
        self._rng, self._check = random.Random(seed), check
        self._config = _resolved(config, {name: self._rng.choice(one) for name, one in check.options.items()})
        self.executor = PagedExecutor(self._config)
        self._watch = _PlanWatch(self._config)
        self.engine = EngineCore(self._config, cast(Executor, self.executor), 0, [self._watch])
        self._now_ns, self._num_requests, self.num_tokens = 0, 0, 0
        self._received: dict[tuple[int, int, int], _Received] = {}  # by client, number, choice
        self._gone: set[int] = set()  # clients that have said goodbye
        self._held: set[int] = set()
        self._prefixes = [[10] * 24, list(range(100, 124))]

    def play(self, num_rounds: int = 16) -> None:
        """Let clients act, then let all requests end, and check what they got. Errors: BrokenContractError."""
        for _ in range(num_rounds):
            inbox = [self._request() for _ in range(self._rng.choice([0, 0, 1, 2, 4]))]
            if self._check.acts and self._rng.random() < 0.4:
                inbox += self._act(self._rng.choice(self._check.acts))
            for _ in range(self._rng.randrange(1, 6)):
                self._step(inbox)
                inbox = []
        self._step([(0, Resume(0)), *[(client, ReleaseClient()) for client in sorted(self._held)]])
        bound = 50 + 50 * sum(self._most(one.message) for one in self._received.values())  # each token may cost all
        for _ in range(bound):
            if not self.engine.has_unfinished:
                break
            self._step([])
        self._check_end(bound)

    def _request(self) -> tuple[int, EngineInput]:
        rng, number, most = self._rng, self._num_requests, self._config.max_model_len
        self._num_requests += 1
        client = rng.choice([one for one in range(_CLIENTS) if one not in self._gone] or [_CLIENTS])
        prompt = [*rng.choice(self._prefixes)[: rng.randrange(1, 24)], *[rng.randrange(10, 500) for _ in range(3)]]
        prompt = prompt[: rng.randrange(1, most)]
        num_choices = rng.choice(self._check.choices)
        params = SamplingParams(
            max_tokens=rng.randrange(1, 30),
            n=num_choices,
            ignore_eos=rng.random() < 0.5,
            temperature=0.8 if num_choices > 1 else rng.choice([0.0, 0.8]),
            detokenize=False,
        )
        message = AddRequest(
            number, np.array(prompt, "<i4").tobytes(), params, seed=rng.randrange(2**32), priority=rng.choice([0, 0, 1])
        )
        for choice in range(params.n):
            self._received[client, number, choice] = _Received(message, choice)
        return client, message

    def _act(self, act: str) -> list[tuple[int, EngineInput]]:
        rng, client = self._rng, self._rng.randrange(_CLIENTS)
        live = [key for key, one in self._received.items() if not one.is_over and one.is_wanted]
        match act:
            case "abort" if live:
                client, number, _ = rng.choice(live)
                self._forget(lambda key: key[:2] == (client, number))
                return [(client, Abort(np.array([number], "<u4").tobytes()))]
            case "goodbye" if len(self._gone) < _CLIENTS - 1:
                self._gone.add(client)
                self._forget(lambda key: key[0] == client)
                return [(client, Goodbye())]
            case "pause":
                return [(0, rng.choice([Pause(0, PauseMode.NEW), Pause(0, PauseMode.ALL), Resume(0)]))]
            case "hold":
                self._held ^= {client}
                return [(client, HoldClient() if client in self._held else ReleaseClient())]
            case "reset":
                return [(0, ResetPrefixCache(0))]
            case "lose":
                self._step([(0, ExecutorLost("a check"))])
                self.executor.forget()
                return [(0, ExecutorRestored())]
            case _:
                return []

    def _forget(self, is_meant: Callable[[tuple[int, int, int]], bool]) -> None:
        for key, one in self._received.items():
            if is_meant(key):
                one.is_wanted = False

    def _step(self, inbox: list[tuple[int, EngineInput]]) -> None:
        self._now_ns += self._rng.choice([0, 1, 3]) * _MS
        has_finished, self._watch.plan = self.engine.scheduler.has_finished_requests, None
        for client, reply in self.engine.step(inbox, self._now_ns):
            self._take(client, reply)
        if has_finished and (plan := self._watch.plan) is not None:
            _expect(len(plan.removed_rows) > 0, f"step {plan.step} removes no row, but has_finished_requests was true")
        self.engine.scheduler.check_integrity()

    def _take(self, client: int, reply: EngineReply) -> None:
        match reply:
            case RequestFailed(number):
                for key, one in self._received.items():
                    if key[:2] == (client, number):
                        _expect(
                            not one.is_wanted or self._never_fits(one), f"request {client}/{number}: {reply.message}"
                        )
                        one.is_over = True
            case Outputs():
                self._take_outputs(client, reply)
            case _:
                pass

    def _take_outputs(self, client: int, reply: Outputs) -> None:
        numbers, positions = (np.frombuffer(each, "<u4").tolist() for each in (reply.numbers, reply.positions))
        counts, tokens = np.frombuffer(reply.counts, "<u2").tolist(), np.frombuffer(reply.tokens, "<i4").tolist()
        choices = np.frombuffer(reply.choices, "<u2").tolist() if reply.choices else [0] * len(numbers)
        reasons = list(reply.finish) if reply.finish else [0] * len(numbers)
        for number, choice, position, count, reason in zip(numbers, choices, positions, counts, reasons, strict=True):
            one, name = self._received[client, number, choice], f"request {client}/{number}, choice {choice}"
            _expect(not one.is_over, f"{name} continues after its end")
            _expect(position == len(one.tokens), f"{name}: position {position}, but it has {len(one.tokens)} tokens")
            one.tokens = [*one.tokens, *tokens[:count]]
            self.num_tokens += count
            one.is_over = bool(reason)
            _expect(reason != FinishReason.ABORT or not one.is_wanted, f"{name} was aborted by nobody")
            tokens = tokens[count:]

    def _check_end(self, bound: int) -> None:
        scheduler = self.engine.scheduler
        left = [key for key, one in self._received.items() if one.is_wanted and not one.is_over]
        _expect(not left, f"{len(left)} requests have not ended after {bound} steps, the first is {left[:1]}")
        _expect(not scheduler.has_unfinished_requests, "all requests have ended, but has_unfinished_requests is true")
        _expect(
            scheduler.get_request_counts() == (0, 0), f"request counts at the end: {scheduler.get_request_counts()}"
        )
        pool = scheduler.pool
        free = pool.num_free, pool.num_fenced
        _expect(free == (pool.num_blocks - 1, 0), f"(free, fenced) blocks at the end: {free} of {pool.num_blocks - 1}")
        for (client, number, choice), one in self._received.items():
            if one.is_wanted and one.tokens:
                wrong = _wrong_token(one)
                _expect(wrong is None, f"request {client}/{number}, choice {choice}: token {wrong} is wrong")
                has_end = one.tokens[-1] == _EOS and not one.message.params.ignore_eos
                length = len(one.tokens)
                _expect(
                    has_end or length == self._most(one.message) - _num_prompt(one.message),
                    f"request {client}/{number}, choice {choice} ended after {length} tokens",
                )

    def _most(self, message: AddRequest) -> int:
        """Return the most tokens of a request, prompt included."""
        return min(_num_prompt(message) + (message.params.max_tokens or 0), self._config.max_model_len)

    def _never_fits(self, one: _Received) -> bool:
        """Return whether a scheduler may refuse the request, because one alone with it could not run it."""
        blocks = -(-(self._most(one.message) - 1) // self._config.block_size)
        return blocks > self._config.num_blocks_override - 1


def _num_prompt(message: AddRequest) -> int:
    return len(message.prompt_token_ids) // 4


def _wrong_token(one: _Received) -> int | None:
    """Return the index of the first token that the fake model would not have given; None: all are right."""
    prompt = np.frombuffer(one.message.prompt_token_ids, "<i4")
    ids = np.concatenate([prompt, np.array(one.tokens, np.int32)]).astype(np.int32)
    first, num_tokens, params = len(prompt), len(one.tokens), one.message.params
    seed = choice_seed(one.message.seed, one.choice) if params.temperature > 0 else 0
    positions = np.arange(first, first + num_tokens, dtype=np.uint64)
    sums = prefix_sums(ids)[first - 1 : first - 1 + num_tokens]
    expected = next_token(sums, positions, np.full(num_tokens, seed, np.uint64), _VOCABULARY)
    wrong = np.flatnonzero(expected != ids[first:])
    return int(wrong[0]) if len(wrong) else None


def _resolved(config: EngineConfig, drawn: Mapping[str, Any]) -> ResolvedConfig:
    """Return the config of an example."""
    num_tokens = (drawn["num_blocks_override"] - 1) * drawn["block_size"]
    sized = msgspec.structs.replace(
        config,
        executor="fake",
        executor_options={"vocab_size": str(_VOCABULARY), "eos_token_id": str(_EOS)},
        max_model_len=min(60, num_tokens),
        recompute_ns_per_token=1,
        swap_ns_per_block=2,
        **{"num_swap_blocks": 0, **drawn},
    )
    return resolve(sized, FakeExecutor(sized).info, lambda *_: 0, total_memory_bytes=_MEMORY_BYTES, num_cpus=1)


class _PlanWatch:
    """A StepWatcher that checks each plan's sizes against the config."""

    def __init__(self, config: ResolvedConfig) -> None:
        self._budget, self._most_rows = config.max_num_batched_tokens, config.max_num_seqs
        self._step = 0
        self.plan: SchedulerOutput | None = None  # of the last step that ran

    def begin(self, plan: SchedulerOutput) -> None:
        """Check a plan that is about to run."""
        step, rows = plan.step, plan.rows.tolist()
        _expect(step == self._step, f"plan {step} comes after plan {self._step - 1}")
        self._step, self.plan = self._step + 1, plan
        _expect(plan.num_tokens <= self._budget, f"step {step}: {plan.num_tokens} tokens, the budget is {self._budget}")
        _expect(len(rows) <= self._most_rows, f"step {step}: {len(rows)} rows, the most are {self._most_rows}")
        _expect(len(set(rows)) == len(rows), f"step {step}: a row is in the batch twice: {rows}")
        counts = plan.num_scheduled_tokens.tolist()
        _expect(min(counts) > 0, f"step {step}: a row gets no token: {counts}")

    def end(self, output: ModelRunnerOutput) -> None:
        """Do nothing: the executor is ours."""
