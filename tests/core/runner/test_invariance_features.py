"""Rows that stand for tokens give the bits of the tokens: in any company, chunks, preemptions, from the cache."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.features.store import Features
from core.models.llama import Llama
from core.proposers.proposer import Proposals
from ipc.tables.arrays import Ints, Rows
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.placed_feature import placed_embeds
from kernels.cpu.build import runnable_variants
from kernels.cpu.library import load_cpu_library
from kernels.elements import to_floats
from tests.core.hostile_drafts import speculative
from tests.core.runner.given_features import with_features
from tests.core.runner.invariance import DTYPES, difference, request, run, tiny_model
from tests.core.runner.invariance_scenarios import PROMPT, SCENARIOS, run_with_features

PLACES = ((5, 40), (45, 64), (130, 33), (262, 28))  # (first token, tokens): side by side, and across blocks


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    load_cpu_library().stop_threads()


def given_rows(model: Llama, prompt: list[int]) -> tuple[Features, list[FeatureUse]]:
    """The embeddings of some of the prompt's tokens, put as features."""
    features, uses = Features(model.config.hidden_size), list[FeatureUse]()
    for first, count in PLACES:
        if first + count > len(prompt):
            break
        rows = to_floats(model.embedding(np.array(prompt[first : first + count])))  # type: ignore[arg-type]
        for placed in placed_embeds(rows, first):
            features.put(0, placed.feature)
            uses.append(placed.use)
    return features, uses


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_embeddings_give_the_bits_of_their_tokens(dtype: str) -> None:
    model = tiny_model(DTYPES[dtype])
    alone = run(model, PROMPT)
    for name in ("among 32", "chunks of 37", "preempted", "from the prefix cache"):
        assert difference(run_with_features(name, model, given_rows(model, PROMPT)), alone) == "", name


@pytest.mark.soak
@pytest.mark.parametrize("variant", runnable_variants())
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_all_scenarios_of_all_variants(dtype: str, variant: str) -> None:
    for kind in ("plain", "local and global", "experts"):
        model = tiny_model(DTYPES[dtype], kind, variant)
        alone = run(model, PROMPT)
        for name in SCENARIOS:
            assert difference(run_with_features(name, model, given_rows(model, PROMPT)), alone) == "", (kind, name)


def test_rows_are_not_scaled_as_embeddings_are() -> None:
    """The rows of the test are scaled already: scaled again, the bits would be others."""
    model = tiny_model(DTYPES["float32"], "local and global")
    assert model.embedding.scale != 1  # type: ignore[attr-defined]
    assert difference(run_with_features("chunks of 37", model, given_rows(model, PROMPT)), run(model, PROMPT)) == ""


def test_a_chunk_of_one_token_may_be_of_a_feature() -> None:
    model, prompt = tiny_model(DTYPES["float32"]), PROMPT[:60]
    features, uses = given_rows(model, prompt)
    got = run(model, prompt, features=features, uses=uses, budget=1, max_tokens=4)
    assert difference(got, run(model, prompt, max_tokens=4)) == ""


def test_several_choices_share_their_rows() -> None:
    model = tiny_model(DTYPES["float32"])
    features, uses = given_rows(model, PROMPT)
    params = {"n": 3}
    alone = run(model, PROMPT, params=params, max_tokens=6)
    assert len(alone.tokens) == 3
    assert difference(run(model, PROMPT, params=params, max_tokens=6, features=features, uses=uses), alone) == ""


class Copies:
    """A Proposer whose drafts are a token and the prompt's first feature."""

    num_asked = 0

    def propose(self, rows: Ints, most: int) -> Proposals:
        self.num_asked += len(rows)
        token_ids = np.full((len(rows), most), -1, np.int32)
        token_ids[:, 0] = 9
        return Proposals(np.full(len(rows), most), token_ids, np.ones(len(rows), np.int64))

    def end(self, rows: Rows) -> None:
        pass


def test_drafts_that_are_copied_from_a_feature_end_before_it() -> None:
    model, prompt, copies = tiny_model(DTYPES["float32"]), PROMPT[:60], Copies()
    features, uses = given_rows(model, prompt)

    def begin(engine: EngineCore) -> None:
        engine.scheduler.speculation.proposers[:] = [copies]

    given: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
    got = run(model, prompt, features=features, uses=uses, begin=begin, speculative=speculative(4), **given)
    assert copies.num_asked > 5
    assert difference(got, run(model, prompt, **given)) == ""


def test_penalties_count_no_rows() -> None:
    model = tiny_model(DTYPES["float32"])
    features, uses = given_rows(model, PROMPT)
    params = {"repetition_penalty": 1.5}
    got = run(model, PROMPT, params=params, features=features, uses=uses)
    assert len(got.tokens[0]) == 16
    plain = run(model, PROMPT, params=params)
    assert (got.logits[0][0] == plain.logits[0][0]).all()  # before the penalty, which counts other tokens
    assert (got.edited[0][0] != plain.edited[0][0]).any()


def test_a_prompt_that_differs_in_one_row_shares_blocks_up_to_it_only() -> None:
    model = tiny_model(DTYPES["float32"])
    features, uses = given_rows(model, PROMPT)
    rows = to_floats(model.embedding(np.array(PROMPT[130:163]))).copy()  # type: ignore[arg-type]
    rows[20] += 0.25
    (other,) = placed_embeds(rows, 130)
    features.put(0, other.feature)
    changed = [*uses[:2], other.use, *uses[3:]]
    first = [with_features(request(1, PROMPT, 3, 0.0), features, uses)]
    alone = run(model, PROMPT, features=features, uses=changed)
    got = run(model, PROMPT, first=first, features=features, uses=changed)
    assert difference(got, alone) == ""
    assert got.num_cached_tokens == 128  # whole blocks before token 130
    assert difference(got, run(model, PROMPT)) != ""
