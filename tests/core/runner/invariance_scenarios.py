"""How the target is run in the invariance tests: what comes before it and beside it, its chunks, its cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from core.engine import EngineCore
from core.features.store import Features
from core.inputs import EngineInput
from core.models.llama import Llama
from core.scheduling.decisions import Cause
from core.scheduling.draft import Draft
from ipc.params.sampling_params import SamplingParams
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.messages import AddRequest
from tests.core.runner.given_features import with_features
from tests.core.runner.invariance import TARGET, Recorder, Run, neighbours, request, run

PROMPT: list[int] = np.random.default_rng(7).integers(1, 500, 300).tolist()

#: Every option that changes logits; of the target with stop_token_ids and min_tokens beside them.
EDITS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
    "logit_bias": {7: 3.0, 11: 2.5, 13: -100.0},
    "bad_words_token_ids": [[7, 7], [11, 7], [42]],
    "min_tokens": 1,
}

#: Every option that narrows the choice of tokens.
FILTERS: dict[str, Any] = {
    "top_k": 12,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_n_sigma": 4.0,
    "typical_p": 0.95,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.08,
    "frequency_penalty": 0.6,
    "repeat_last_n": 6,
    "allowed_token_ids": list(range(3, 400, 2)),
}


def mixed(plain: Sequence[tuple[int, AddRequest]]) -> list[tuple[int, AddRequest]]:
    """The same requests, with options of every kind in turn; some have none."""
    options: list[dict[str, Any]] = [{}, EDITS, FILTERS, {"logprobs": 2, "prompt_logprobs": 1}, {"n": 2, **EDITS}]

    def params(message: AddRequest) -> Any:
        wanted = dict(options[message.number % len(options)])
        if message.params.temperature == 0:
            wanted.pop("n", None)
        return msgspec.structs.replace(message.params, **wanted)

    return [(client, msgspec.structs.replace(message, params=params(message))) for client, message in plain]


def without_options(sent: tuple[int, AddRequest]) -> tuple[int, AddRequest]:
    """The same request, one choice of its tokens by temperature alone."""
    client, message = sent
    params = message.params
    plain = SamplingParams(temperature=params.temperature, max_tokens=params.max_tokens, ignore_eos=True)
    return client, msgspec.structs.replace(message, params=plain)


class Scenario(NamedTuple):
    """group: what it varies: neighbours, chunks, preempted or cached; settings: of run()."""

    group: str
    settings: dict[str, Any]


#: Each must give the target what it gives alone.
SCENARIOS: dict[str, Scenario] = {
    "among 32": Scenario("neighbours", {"neighbours": mixed(neighbours(32, 1, 200, 40))}),
    "among 32 others": Scenario("neighbours", {"neighbours": mixed(neighbours(32, 2, 60, 30)), "budget": 300}),
    "chunks of 128": Scenario("chunks", {"budget": 128}),
    "chunks of 37": Scenario("chunks", {"budget": 37}),
    "chunks of 7": Scenario("chunks", {"budget": 7}),
    "preempted": Scenario(
        "preempted",
        {"neighbours": mixed(neighbours(9, 3, 30, 90)), "num_blocks": 36, "budget": 60, "policy": "priority"},
    ),
    "from the prefix cache": Scenario("cached", {"first": [request(1, PROMPT[:290], 3, 0.0)]}),
    "prefix cache, other chunks": Scenario("cached", {"first": [request(1, PROMPT, 9, 0.0)], "budget": 11}),
}

#: One scenario of each group, of the neighbours those with fewer tokens, and chunks that end within a KV block.
ONE_OF_EACH = ["from the prefix cache", "preempted", "chunks of 128", "among 32 others", "chunks of 7"]


def scenario(name: str, model: Llama, *, reads_cache: bool = True, mixes: bool = True, **target: Any) -> Run:
    """The target with these arguments of run(), in the scenario, which must have done what it is named after.
    reads_cache: False for a target with prompt_logprobs, whose prompt is computed. mixes: its neighbours have options
    of every kind. What these do with logits does not depend on the model, so most models do without."""
    group, settings = SCENARIOS[name]
    if not mixes and "neighbours" in settings:
        settings = {**settings, "neighbours": [without_options(one) for one in settings["neighbours"]]}
    got = run(model, PROMPT, **settings, **target)
    if group == "preempted":
        assert got.num_preemptions > 0, "the target was not preempted: the pool is too large"
    if group == "cached" and reads_cache:
        assert got.num_cached_tokens > 200, f"only {got.num_cached_tokens} tokens came from the prefix cache"
    return got


def progress(engine: EngineCore) -> tuple[int, int] | None:
    """(computed tokens, output tokens) of the target; None while it has no row."""
    table, rows = engine.scheduler.table, engine.scheduler.running
    mine = rows[table.number[rows] == TARGET]
    if not len(mine):
        return None
    row = int(mine[0])
    return int(table.num_computed_tokens[row]), int(table.num_tokens[row] - table.num_prompt_tokens[row])


def preempt(engine: EngineCore, row: int) -> None:
    """Preempt the row as if another one needed its room: between steps, so that nothing is planned yet."""
    engine.scheduler.preemption.preempt(Draft(0, 0, 0), row, Cause.MORE_URGENT)


class Preempting:
    """Before these steps (all: None) the target is preempted, as it would be for want of blocks; it must be the
    youngest request that runs. forgets: the prefix cache is lost, so that all is computed again."""

    def __init__(self, steps: set[int] | None, forgets: bool) -> None:
        self._steps, self._forgets = steps, forgets
        self._step = 0
        self.seen: set[tuple[int, int]] = set()  # progress at preemption

    def __call__(self, engine: EngineCore, recorder: Recorder) -> list[tuple[int, EngineInput]]:
        self._step += 1
        at = progress(engine)
        if at is not None and (self._steps is None or self._step in self._steps):
            self.seen.add(at)
            preempt(engine, int(engine.scheduler.running[-1]))
            assert progress(engine) is None, "another request was preempted"
            if self._forgets:
                engine.scheduler.reset_prefix_cache()
        return []


def run_with_features(name: str, model: Llama, given: tuple[Features, Sequence[FeatureUse]], **target: Any) -> Run:
    """The target with features in a scenario; what has filled the cache before it has them, too."""
    group, settings = SCENARIOS[name][0], dict(SCENARIOS[name][1])
    features, uses = given
    settings["first"] = [with_features(one, features, uses) for one in settings.get("first", ())]
    beside = list(settings.get("neighbours", ()))
    if beside:
        beside[1:1] = [with_features(request(900, PROMPT, 20, 0.0), features, uses)]
    got = run(model, PROMPT, features=features, uses=uses, **{**settings, "neighbours": beside}, **target)
    if group == "preempted":
        assert got.num_preemptions > 0, "the target was not preempted: the pool is too large"
    if group == "cached":
        assert got.num_cached_tokens > 200, f"only {got.num_cached_tokens} tokens came from the prefix cache"
    return got
