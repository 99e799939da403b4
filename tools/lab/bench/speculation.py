"""The gain of speculation: the same requests with and without it, turn about, on two engines of one machine.

Prompts are made here. "edit": a file, and the beginning of the same file with one name changed, as an editor completes
it; most of the answer is in the prompt. The model ends it. "chat": short questions; almost nothing of their answers is
in the prompt. One request runs at a time. "batch32" is the workload of that name, with all requests at once.
Ratios are of medians: without / with, above 1 = faster with speculation; cpu_ratio is that of these processes' CPU
time, which does not include waiting for a core (with one thread; several threads wait for each other by spinning). The
tokens of both are compared.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from frontend.llm import LLM
from ipc.errors import ConfigError
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.version import NAME, VERSION
from tools.lab.bench.quiet import cpu_use
from tools.lab.bench.workloads import make_workload

_MAX_TOKENS = {"edit": 400, "chat": 96}
_NUM_FILES = 6
_QUESTIONS = (
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "What is a prime number?",
    "Why do cats purr?",
    "How do I boil an egg?",
    "What is the capital of Norway, and what is it known for?",
)
_NOUNS = ("order", "user", "photo", "invoice", "track", "ticket")
_FIELDS = ("name", "price", "owner", "state", "weight", "length", "rating", "colour")


class _Case(NamedTuple):
    """A workload at one temperature."""

    name: str
    temperature: float


CASES = (
    _Case("edit", 0.0),
    _Case("edit", 0.7),
    _Case("chat", 0.0),
    _Case("chat", 0.7),
    _Case("batch32", 0.0),
    _Case("batch32", 0.7),
)


class _Round(NamedTuple):
    """One run of a workload on one engine."""

    seconds: float
    cpu_seconds: float
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    tokens: list[list[int]]


def measure_speculation(options: dict[str, Any], *, rounds: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a record for each case of these workloads; all of them if no names are given.

    options: of the engine, with the speculative_config to measure; default: ngram.

    Errors: those of LLM; ConfigError for an unknown name.
    """
    known = dict.fromkeys(case.name for case in CASES)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"unknown workload {unknown[0]!r}; known are {', '.join(known)}")
    speculative = options.get("speculative_config") or {"method": "ngram"}
    with (
        LLM(**{**options, "speculative_config": None}) as without,
        LLM(**{**options, "speculative_config": speculative}) as with_drafts,
    ):
        for case in CASES:
            if not names or case.name in names:
                yield {
                    "engine": NAME,
                    "version": VERSION,
                    "workload": "speculation",
                    "speculative_config": speculative,
                    "dtype": options.get("dtype"),
                    "rounds": rounds,
                    **case._asdict(),
                    **_compare(without, with_drafts, case, rounds),
                }


def _compare(without: LLM, with_drafts: LLM, case: _Case, rounds: int) -> dict[str, Any]:
    engines = (without, with_drafts)
    runs: tuple[list[_Round], list[_Round]] = ([], [])
    for engine in engines:
        _run(engine, case, -1, limit=1)  # warm-up
    for round_ in range(rounds):
        for which in (0, 1) if round_ % 2 else (1, 0):
            runs[which].append(_run(engines[which], case, 2 * round_ + (case.temperature > 0)))
    plain, drafting = runs
    num_tokens = sum(map(len, plain[0].tokens))
    seconds = [statistics.median(one.seconds for one in each) for each in runs]
    cpu_seconds = [statistics.median(one.cpu_seconds for one in each) for each in runs]
    return {
        "num_tokens": num_tokens,
        "tokens_per_s_without": round(num_tokens / seconds[0], 2),
        "tokens_per_s_with": round(num_tokens / seconds[1], 2),
        "ratio": round(seconds[0] / seconds[1], 3),
        "cpu_ratio": round(cpu_seconds[0] / max(cpu_seconds[1], 1e-9), 3),
        "tokens_per_step": round(sum(map(len, drafting[0].tokens)) / drafting[0].num_steps, 3),
        "num_draft_tokens": drafting[0].num_draft_tokens,
        "num_accepted_tokens": drafting[0].num_accepted_tokens,
        "num_different_requests": sum(
            one != other
            for first, second in zip(plain, drafting, strict=True)
            for one, other in zip(first.tokens, second.tokens, strict=True)
        ),
    }


def _run(llm: LLM, case: _Case, round_: int, limit: int | None = None) -> _Round:
    """Run the first `limit` requests of a case; None: all. Rounds have different prompts, because repeated ones would
    be cached.
    """
    before, outputs = llm.statistics(), []
    cpu, begin = cpu_use().ours, time.monotonic()
    if case.name == "batch32":
        requests = make_workload("batch32").shifted(64 + round_).requests[:limit]
        params = [_params(case.temperature, one.max_tokens, seed) for seed, one in enumerate(requests)]
        prompts: Any = [{"prompt_token_ids": one.prompt} for one in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    elif case.name == "edit":
        for seed in range(_NUM_FILES)[:limit]:
            params = [_params(case.temperature, _MAX_TOKENS["edit"], seed, stop="```")]
            outputs += llm.generate([_edit(seed, round_)], params, use_tqdm=False)
    else:
        for seed, text in enumerate(_QUESTIONS[:limit]):
            chat: Any = [{"role": "user", "content": f"({round_ + 2}) {text}"}]
            outputs += llm.chat(chat, _params(case.temperature, _MAX_TOKENS["chat"], seed), use_tqdm=False)
    seconds, cpu_seconds, after = time.monotonic() - begin, cpu_use().ours - cpu, llm.statistics()
    return _Round(
        seconds,
        cpu_seconds,
        after.num_steps - before.num_steps,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        [list(output.outputs[0].token_ids) for output in outputs],
    )


def _params(temperature: float, max_tokens: int, seed: int, stop: str | None = None) -> SamplingParams:
    """Return parameters of a request that ends at `stop`, or never before max_tokens."""
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=stop is None,
        stop=stop,
        detokenize=stop is not None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _edit(number: int, round_: int) -> str:
    """Return a file of a class and a function, and the beginning of the same file with another name of the class."""
    noun, other = _NOUNS[number], _NOUNS[number - 1]
    fields = [_FIELDS[(number + step) % len(_FIELDS)] for step in (0, 3, 5)]
    given = ", ".join(fields)
    code = "\n".join(
        (
            f"class {noun.title()}:",
            f"    def __init__(self, {given}):",
            *(f"        self.{field} = {field}" for field in fields),
            *(f"\n    def get_{field}(self):\n        return self.{field}" for field in fields),
            *(f"\n    def set_{field}(self, {field}):\n        self.{field} = {field}" for field in fields),
            f"\n\ndef sort_{noun}s({noun}s):",
            f"    return sorted({noun}s, key=lambda {noun}: {noun}.{fields[0]})",
        )
    )
    return (
        f"File {round_ + 2} has the class {noun.title()}:\n\n```python\n{code}\n```\n\n"
        f"The same file, with the class renamed from {noun.title()} to {other.title()}:\n\n```python\n"
    )
