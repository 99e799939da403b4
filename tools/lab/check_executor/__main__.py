"""`engine-core check-executor`: check an executor, usually a plug-in's, under the real scheduler in this process.

It runs the same random requests one by one, together, in chunks, preempted, swapped, from the prefix cache and with two
steps in flight. Each output is checked against its plan. At numerics level L2 all answers must be bit-identical.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from core.process.resolve import BlocksIn
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.options.workers import has_workers
from tools.flags.options import ArgumentParser, add_engine_options, engine_options
from tools.lab.check_executor.requests import Plan, make_requests
from tools.lab.check_executor.stand import Answer, Stand
from tools.lab.check_executor.watch import BrokenContractError

_NUM_REQUESTS = 36
_WORDS = {True: "ok", False: "FAILED", None: "seen"}


def main(arguments: Sequence[str]) -> int:
    """Print a line for each check, and return the exit status: 1 if one failed. Errors: ConfigError; the executor's."""
    parser = ArgumentParser(
        prog="engine-core check-executor",
        usage="engine-core check-executor NAME [--requests N] [OPTION ...]",
        description="Check that an executor follows the contract of docs/executors.md; for a plug-in's CI.",
    )
    parser.add_argument("name", metavar="NAME", help="the executor's name: a plug-in's, or local or fake")
    parser.add_argument("--requests", type=int, default=_NUM_REQUESTS, metavar="N", help="default: %(default)s")
    add_engine_options(parser)
    parsed = parser.parse_args(arguments)
    if not 1 <= parsed.requests <= 4096:
        parser.error("--requests must be from 1 to 4096")
    config = config_from_options(**{**engine_options(parsed), "executor": parsed.name})
    num_failed = 0
    for finding in check_executor(config, parsed.requests):
        print(f"{_WORDS[finding.is_right]:>6}  {finding.name}: {finding.text}", flush=True)
        num_failed += finding.is_right is False
    print(f"executor {parsed.name}: " + (f"{num_failed} of its checks failed" if num_failed else "every check passed"))
    return 1 if num_failed else 0


# The checks of an executor: each runs the same requests under other conditions and compares the answers.


_MODEL_LEN = 80
_ROWS = 8
_BLOCK = 4  # tokens
_ROOMY = 8 * 20 * 4  # blocks: no request is ever preempted
_FEW = 33  # including the null block; one request takes up to 20 of them
_BUDGET = 16  # tokens of a step, if prompts are computed in chunks
_LEVELS = ("L0", "L1", "L2")


class Finding(NamedTuple):
    """The outcome of one check. is_right: None for an observation without a promise."""

    name: str
    is_right: bool | None
    text: str


def check_executor(config: EngineConfig, num_requests: int) -> Iterator[Finding]:
    """Yield the outcome of each check of the executor that the config names.

    config: its sizes are replaced. Errors: those of the executor's create() and initialize_cache().
    """
    small = msgspec.structs.replace(
        config,
        max_model_len=_MODEL_LEN,
        max_num_seqs=_ROWS,
        block_size=_BLOCK,
        num_blocks_override=_ROOMY,
        max_num_batched_tokens=_ROWS * _MODEL_LEN,
        enable_prefix_caching=False,
        preemption_mode="recompute",
    )
    stand = Stand(small)
    try:
        yield from _facts(stand)
        plans = make_requests(stand.info, num_requests)
        level = stand.info.numerics
        alone = [stand.ask([plan])[0] for plan in plans]
        yield _whole(plans, alone)
        yield from _compared("together", level, alone, stand, lambda: stand.ask(plans, per_step=2))
        yield _aborted(plans, alone, stand, level)
    except BrokenContractError as error:
        yield Finding("outputs", False, str(error))
        return
    finally:
        stand.close()
    for name, changes in _circumstances(small).items():
        yield from _under(name, msgspec.structs.replace(small, **changes), plans, alone, level)


def _circumstances(config: EngineConfig) -> dict[str, dict[str, object]]:
    """Return the changed options of each further engine."""
    few: dict[str, object] = {"num_blocks_override": _FEW}
    found: dict[str, dict[str, object]] = {
        "in chunks": {"max_num_batched_tokens": _BUDGET},
        "preempted": few,
        "swapped": {**few, "preemption_mode": "swap", "swap_space_bytes": 64 << 20},
        "cached": {"enable_prefix_caching": True},
    }
    if config.executor != "local" or has_workers(config):
        found["two steps at once"] = {"async_scheduling": True}
    return found


def _under(name: str, config: EngineConfig, plans: list[Plan], alone: list[Answer], level: str) -> Iterator[Finding]:
    stand = Stand(config)
    try:
        if config.enable_prefix_caching:
            stand.ask(plans)
        yield from _compared(name, level, alone, stand, lambda: stand.ask(plans, per_step=4))
    except BrokenContractError as error:
        yield Finding(name, False, str(error))
    finally:
        stand.close()


def _facts(stand: Stand) -> Iterator[Finding]:
    """Check the executor's description of itself."""
    info, faults = stand.info, []
    if not info.fingerprint:
        faults.append("no fingerprint")
    if info.numerics not in _LEVELS:
        faults.append(f"numerics {info.numerics!r} is not one of {', '.join(_LEVELS)}")
    if info.vocab_size < 2:
        faults.append(f"a vocabulary of {info.vocab_size}")
    if info.max_model_len < _MODEL_LEN:
        faults.append(f"max_model_len {info.max_model_len}, but the check needs {_MODEL_LEN}")
    if any(not 0 <= token < info.vocab_size for token in info.eos_token_ids):
        faults.append(f"end tokens {info.eos_token_ids} beyond the vocabulary of {info.vocab_size}")
    faults += _faults_of_sizes(stand.blocks_in)
    told = f"{info.name}, numerics {info.numerics}, {info.dtype}, vocabulary {info.vocab_size}"
    yield Finding("facts", not faults, "; ".join(faults) or told)


def _faults_of_sizes(blocks_in: BlocksIn) -> list[str]:
    """Return what is wrong with the number of blocks that fit into some memory."""
    small, large, coarse = blocks_in(1 << 30, 16), blocks_in(1 << 32, 16), blocks_in(1 << 30, 32)
    if small < large and coarse <= small:
        return []
    return [f"{small} blocks of 16 tokens fit 1 GiB, {large} fit 4 GiB, {coarse} of 32 tokens fit 1 GiB"]


def _whole(plans: list[Plan], alone: list[Answer]) -> Finding:
    """Check that each request got all of its tokens and log probabilities."""
    for number, (plan, answer) in enumerate(zip(plans, alone, strict=True)):
        wanted, params = plan.params.max_tokens, plan.params
        if answer.failure or len(answer.token_ids) != wanted:
            return Finding(
                "alone", False, f"request {number}: {len(answer.token_ids)} of {wanted} tokens {answer.failure}"
            )
        most = 0 if params.logprobs is None else len(answer.token_ids) * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            most += (len(plan.prompt) - 1) * (1 + params.prompt_logprobs)
        if len(answer.values) != 4 * most:
            return Finding(
                "alone", False, f"request {number}: {len(answer.values) // 4} log probabilities, {most} asked for"
            )
    return Finding("alone", True, f"{len(plans)} requests, one after the other")


def _compared(
    name: str, level: str, alone: list[Answer], stand: Stand, ask: Callable[[], list[Answer]]
) -> Iterator[Finding]:
    """Run the requests again, and compare with the answers that each one got alone: at L2 every bit is the same."""
    answers = ask()
    failed = [f"request {number}: {answer.failure}" for number, answer in enumerate(answers) if answer.failure]
    if failed:
        yield Finding(name, False, failed[0])
        return
    same = sum(one == other for one, other in zip(alone, answers, strict=True))
    counters = stand.statistics
    seen = f"{counters.num_preemptions} preemptions, {counters.prefix_cache_hits} tokens found"
    text = f"{same}/{len(alone)} requests bit-identical to alone; {seen}"
    yield Finding(name, same == len(alone) if level == "L2" else None, text)


def _aborted(plans: list[Plan], alone: list[Answer], stand: Stand, level: str) -> Finding:
    """Abort every third request in the middle; the others must continue, and all blocks must be freed."""
    which = frozenset(range(0, len(plans), 3))
    answers = stand.ask(plans, per_step=2, aborted=which)
    kept = [number for number in range(len(plans)) if number not in which]
    same = sum(answers[number] == alone[number] for number in kept)
    held = stand.num_held_blocks()
    is_right = not held and (same == len(kept) or level != "L2")
    return Finding("aborted", is_right, f"{same}/{len(kept)} neighbours as alone, {held} blocks still held")
