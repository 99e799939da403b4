"""Scenario: all that a seed decides before the clock starts: the engine, the programs, the faults and their times."""

import random
from typing import Any, NamedTuple, TypeAlias

import msgspec

from core.executors.fake_options import read_fake_options
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.pin_messages import Pin
from tests.core.driving import small_config
from tests.core.hostile_drafts import speculative
from tests.fake_options import fake_options, with_options
from tests.simulation.oracle import Rules
from tests.simulation.plan import Abort, Action, Ask, Call, Connect, Discard, Leave, Plan, Submit
from tests.simulation.world import MS

_EOS = 2
_HORIZON = 5  # programs begin and faults happen within so many of the longest delays


class Cut(NamedTuple):
    """A connection is cut; each side notices after so many ns."""

    client: int
    engine_notices_ns: int
    client_notices_ns: int


class Slow(NamedTuple):
    """What the engine sends to a client arrives late."""

    client: int
    duration_ns: int


class StopClient(NamedTuple):
    client: int
    duration_ns: int


class KillClient(NamedTuple):
    client: int
    vanishes_ns: int | None  # after so long the engine notices; None: as soon as the kernel closes its connections


class StopEngine(NamedTuple):
    duration_ns: int


class KillEngine(NamedTuple):
    loses_frames: bool  # what it sent last does not arrive


class FailStep(NamedTuple):
    """The executor raises in the next step."""


Fault: TypeAlias = Cut | Slow | StopClient | KillClient | StopEngine | KillEngine | FailStep
_SHARES: dict[type[Fault], float] = {
    Cut: 8,
    Slow: 4,
    StopClient: 4,
    KillClient: 2,
    StopEngine: 3,
    KillEngine: 1,
    FailStep: 0.5,
}


class Scenario(NamedTuple):
    """The engine, the programs and the faults of one run.

    has_states: the model has recurrent layers, whose states go to a store with the blocks. is_tight: clients are too
    slow for the engine's bounds now and then. capacity: frames in the socket's queue for each client. hold_bytes,
    hold_s, max_merged_bytes, max_inbox, messages_per_round: bounds that production has in other sizes.
    """

    config: EngineConfig
    rules: Rules
    is_paged: bool
    has_states: bool
    lease_ms: int
    is_tight: bool
    capacity: int
    hold_bytes: int
    hold_s: float
    max_merged_bytes: int
    max_inbox: int
    messages_per_round: int
    max_delay_ns: int
    duplicate_share: float
    restart_ns: int
    plans: list[Plan]
    faults: list[tuple[int, Fault]]


def draw(seed: int) -> Scenario:
    """Draw the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    config = _config(rng)
    vocab_size, is_paged = read_fake_options(config).vocab_size, rng.random() < 0.5
    num_clients = rng.choice((1, 2, 2, 3, 3))
    poison = vocab_size - 1 if is_paged and rng.random() < 0.2 else None
    max_delay_ns = rng.choice((1, 2, 4)) * MS
    horizon_ns = _HORIZON * max_delay_ns
    prefixes = [[rng.randrange(vocab_size) for _ in range(16)] for _ in range(2)]
    plans = []
    for index in range(num_clients):
        asks = [draw_ask(rng, config, prefixes, has_logprobs=not is_paged) for _ in range(rng.choice((1, 2, 2, 3)))]
        plans.append(_plan(rng, index, asks, horizon_ns))
    if rng.random() < 0.25:
        plans.append(_owner(rng, horizon_ns))
    if config.enable_prefix_caching and (follower := random.Random(f"follower {seed}").randrange(12)) < num_clients:
        plans[follower] = plans[follower]._replace(follows=True)
    if seed % 3 == 1:  # with their own draws: the other seeds' runs stay as they are
        plans = _with_pins(random.Random(f"pins {seed}"), plans)
    has_states = is_paged and config.enable_prefix_caching and seed % 2 == 0  # no draw: other seeds stay as they are
    if has_states:
        config = _with_states(config)
    is_tight = rng.random() < 0.4
    return Scenario(
        config=config,
        rules=Rules(vocab_size, _EOS, config.max_model_len or 0, poison),
        is_paged=is_paged,
        has_states=has_states,
        lease_ms=rng.choice((30, 60, 60, 200)),
        is_tight=is_tight,
        capacity=rng.choice((1, 2, 4)) if is_tight else 256,
        hold_bytes=rng.choice((60, 150, 400)) if is_tight else 1 << 20,
        hold_s=rng.choice((0.02, 0.1, 30.0)),
        max_merged_bytes=rng.choice((40, 200, 64 << 10)),
        max_inbox=rng.choice((131_072, 131_072, 131_072, 6)),
        messages_per_round=rng.choice((256, 256, 256, 1)),
        max_delay_ns=max_delay_ns,
        duplicate_share=rng.choice((0.0, 0.0, 0.05, 0.3)),
        restart_ns=rng.randrange(40 * MS),
        plans=plans,
        faults=_faults(rng, num_clients, horizon_ns),
    )


def _config(rng: random.Random) -> EngineConfig:
    block_size = rng.choice((1, 2, 4))
    policy, mode = rng.choice(("fcfs", "priority", "fair")), rng.choice(("recompute", "recompute", "swap", "auto"))
    chunked = rng.random() < 0.85
    options: dict[str, Any] = {
        "num_blocks": rng.choice((24, 24, 32, 48)) // block_size + 2,
        "block_size": block_size,
        "max_num_seqs": rng.choice((1, 2, 3, 6)),
        "budget": rng.choice((4, 9, 64)) if chunked else 128,
        "depth": rng.choice((1, 2)),
        "prefix_caching": rng.random() < 0.75,
        "scheduling_policy": policy,
        "priority_aging_seconds": rng.choice((0.0, 0.003)),
        "fair_quantum": rng.choice((4, 40)),
        "client_weights": {"client 0": 3.0} if rng.random() < 0.5 else {},
        "preemption_mode": mode,
        "num_swap_blocks": 0 if mode == "recompute" else rng.choice((3, 20)),
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": rng.choice((0, 0, 3)) if chunked else 0,
        "max_num_partial_prefills": rng.choice((0, 0, 1)),
        "scheduler_delay_factor": rng.choice((0.0, 0.0, 0.0, 1.5)),
        "admission_lookahead": rng.choice((8, 0, 1)),
        "watermark": rng.choice((0.0, 0.1)),
        "reserve_full_length": rng.random() < 0.1,
        "max_num_queued_requests": rng.choice((65_536, 65_536, 65_536, 2)),
        "executor_options": fake_options(eos_token_id=_EOS),
    }
    if options["prefix_caching"]:
        options["num_host_blocks"] = (0, 6, 30)[(options["num_blocks"] + options["budget"]) % 3]
    if rng.random() < 0.3:
        options["speculative_config"] = speculative(rng.choice((1, 3, 9)))
    return with_options(small_config(**options), executor_options=fake_options(vocab_size=rng.choice((30, 200))))


def _with_states(config: EngineConfig) -> EngineConfig:
    """Return the config of a model with recurrent layers and a store. A state has one byte; there are few slots."""
    num_slots = (4, 12, 40)[config.max_num_seqs % 3]
    more = {"kv_cache_memory_bytes": 2 * (config.max_num_seqs + num_slots), "swap_space_bytes": 8}
    return msgspec.structs.replace(config, kv_dir="played", num_host_blocks=config.num_host_blocks or 12, **more)


def _plan(rng: random.Random, index: int, asks: list[Ask], horizon_ns: int) -> Plan:
    actions: list[tuple[int, Action]] = [(rng.randrange(horizon_ns // 5), Connect())]
    for number in range(len(asks)):
        begin_ns = rng.randrange(horizon_ns)
        actions.append((begin_ns, Submit(number)))
        if rng.random() < 0.25:
            n = asks[number].params.n
            choices = [] if rng.random() < 0.5 else sorted(rng.sample(range(n), rng.randint(1, n)))
            actions.append((begin_ns + rng.randrange(horizon_ns), Abort(number, choices)))
        if rng.random() < 0.08:
            actions.append((begin_ns + rng.randrange(horizon_ns), Discard(number)))
    if rng.random() < 0.1:
        actions.append((rng.randrange(horizon_ns), Leave()))
    if rng.random() < 0.1:
        call = rng.choice((Call.STATISTICS, Call.EXPLAIN, Call.RESET_PREFIX_CACHE))
        actions.append((rng.randrange(horizon_ns), call))
    actions.sort(key=lambda one: one[0])
    grace_ns = rng.choice((20, 100)) * MS
    return Plan(f"client {index}", rng.random() < 0.7, False, grace_ns, asks, actions)


def draw_ask(rng: random.Random, config: EngineConfig, prefixes: list[list[int]], *, has_logprobs: bool) -> Ask:
    vocab_size, room = read_fake_options(config).vocab_size, config.max_model_len or 0
    prompt = rng.choice(prefixes)[: rng.randrange(17)] + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 6))]
    if rng.random() < 0.02:
        prompt[-1] = vocab_size  # no such token
    max_tokens = rng.choices((1, 3, 5, 8, 16, None), (3, 4, 4, 4, 2, 1))[0]
    draws = rng.random() < 0.4
    params = SamplingParams(
        n=rng.choice((1, 1, 2, 3)) if draws else 1,
        temperature=1.0 if draws else 0.0,
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, min(2, max_tokens or 2))),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=sorted(rng.sample(range(vocab_size), vocab_size // 15)) if rng.random() < 0.3 else None,
        logprobs=rng.choice((0, 2)) if has_logprobs and rng.random() < 0.4 else None,
        prompt_logprobs=1 if has_logprobs and rng.random() < 0.2 else None,
    )
    return Ask(
        prompt[: room - 1],
        params,
        seed=rng.getrandbits(64),
        priority=rng.choice((0, 0, -1, 5)),
        cache_salt=rng.choice(("", "", "", "salt")),
        deadline_ms=rng.choice((0, 0, 0, 0, 0, 15, 60)),
        streaming=rng.random() < 0.7,
    )


def _with_pins(rng: random.Random, plans: list[Plan]) -> list[Plan]:
    """Let some requests pin their prompts."""

    def pins() -> tuple[Pin, ...]:
        names = rng.sample(["", "a", "b"], rng.choice((0, 1, 1, 2)))
        return tuple(Pin(name, rng.choice((2, 20, 200)), is_required=rng.random() < 0.1) for name in names)

    return [plan._replace(asks=[ask._replace(pins=pins()) for ask in plan.asks]) for plan in plans]


def _owner(rng: random.Random, horizon_ns: int) -> Plan:
    """Draw the plan of the engine's owner, which has no requests."""
    calls = {
        Call.STATISTICS: 3,
        Call.EXPLAIN: 3,
        Call.RESET_PREFIX_CACHE: 2,
        Call.PAUSE_NEW: 3,
        Call.PAUSE_ALL: 3,
        Call.DRAIN: 1,
        Call.SHUTDOWN: 1,
    }
    chosen = rng.choices(list(calls), list(calls.values()), k=rng.randint(1, 3))
    times = sorted(rng.randrange(horizon_ns) for _ in chosen)
    return Plan("owner", False, True, 0, [], list(zip(times, chosen, strict=True)))


def _faults(rng: random.Random, num_clients: int, horizon_ns: int) -> list[tuple[int, Fault]]:
    """Draw times and faults; every seventh scenario has none."""
    return sorted(
        ((rng.randrange(horizon_ns), _fault(rng, num_clients)) for _ in range(rng.choice((0, 1, 1, 2, 3, 4, 6)))),
        key=lambda one: one[0],
    )


def _fault(rng: random.Random, num_clients: int) -> Fault:
    client, long_ns = rng.randrange(num_clients), rng.choice((3, 20, 100)) * MS
    kind: type[Fault] = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
    if kind is Cut:
        return Cut(client, rng.randrange(long_ns), rng.randrange(rng.choice((MS, long_ns))))
    if kind is KillClient:
        return KillClient(client, rng.choice((None, long_ns)))
    if kind is KillEngine:
        return KillEngine(rng.random() < 0.5)
    if kind is StopEngine:
        return StopEngine(long_ns)
    if kind is FailStep:
        return FailStep()
    return Slow(client, long_ns) if kind is Slow else StopClient(client, long_ns)
