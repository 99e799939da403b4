"""A subset of JSONSchemaBench: what a schema says is obeyed or refused by name, and masks are llguidance's own.

tests/data/README.md says where the schemas come from.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from ipc.errors import InvalidRequestError
from ipc.params.json_schemas import drop_annotations, spell_dependencies
from ipc.params.schema_names import keep_names
from ipc.params.schema_texts import plain_texts
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import FinishReason
from tests.core.test_structured_outputs import Runs, add
from tests.core.test_structured_schemas import FORMATS
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, allowed, make_grammars, text_of, tokenizer_files

LINES = (Path(__file__).parents[2] / "data" / "jsonschemabench_60.jsonl").read_text().splitlines()
SCHEMAS: dict[str, Any] = {one["name"]: one["schema"] for one in map(json.loads, LINES)}
#: What the library says of those that it refuses.
REASONS = (
    'Unimplemented keys: ["dependencies"]',
    'Unimplemented keys: ["not"]',
    "branches of oneOf must exclude one another",
    "Unsatisfiable schema: required property",  # a condition that no object fulfils
)


def constraint(name: str, **options: Any) -> StructuredOutputsParams:
    """Strings end by chance; that further properties do is not so sure."""
    return StructuredOutputsParams(json=SCHEMAS[name], disable_additional_properties=True, **options)


@cache
def usable() -> list[str]:
    grammars, names = make_grammars(), []
    for name in SCHEMAS:
        try:
            grammars.matcher(constraint(name))
        except InvalidRequestError as error:
            if not any(reason in str(error) for reason in REASONS):
                raise
        else:
            names.append(name)
    return names


def check(names: list[str], seed: int, compact: bool) -> None:
    """The outputs that the fake executor's made-up tokens make of these schemas."""
    runs = Runs(max_model_len=3000, num_blocks=4000, max_num_seqs=len(names))
    wanted = dict(enumerate(names, 1000 * seed))
    runs.step(
        [
            add(number, constraint(name, disable_any_whitespace=compact), max_tokens=2500, temperature=1.0)
            for number, name in wanted.items()
        ]
    )
    for number, one in runs.drain().items():
        assert one.finish is FinishReason.STOP, (wanted[number], one.failed, text_of(one.tokens)[:200])
        jsonschema.validate(json.loads(text_of(one.tokens)), SCHEMAS[wanted[number]], format_checker=FORMATS)


def test_what_is_not_obeyed_is_refused_by_name() -> None:
    assert (len(SCHEMAS), len(usable())) == (60, 51)


@pytest.mark.parametrize("part", range(4))
def test_every_output_parses_and_validates(part: int) -> None:
    check(usable()[part::4], seed=part, compact=True)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
def test_soak_every_output_parses_and_validates(seed: int) -> None:
    check(usable(), seed, compact=seed % 2 == 0)


def as_written(schema: Any) -> Any:
    return spell_dependencies(drop_annotations(schema))


def test_masks_are_the_library_s_own() -> None:
    """The library reads tokenizer.json itself, too."""
    theirs = LLTokenizer(tokenizer_files()["tokenizer.json"].decode(), n_vocab=VOCAB_SIZE, eos_token=EOS)
    grammars, rng, num_masks = make_grammars(), random.Random(0), 0
    for name in usable():
        params = StructuredOutputsParams(json=SCHEMAS[name], whitespace_pattern=r"[\x20\x0A\x0D\x09]+")
        ours = grammars.matcher(params)
        other = LLMatcher(
            theirs, LLMatcher.grammar_from_json_schema(json.dumps(plain_texts(keep_names(as_written(SCHEMAS[name])))))
        )
        for _ in range(40):
            mask = allowed(np.frombuffer(ours.compute_bitmask(), np.uint32))
            assert mask == allowed(np.frombuffer(other.compute_bitmask(), np.uint32)), name
            num_masks += 1
            token = rng.choice(mask)
            if token == EOS:
                break
            assert ours.consume_token(token)
            assert other.consume_token(token)
    assert num_masks > 1000


def test_what_the_library_takes_as_a_token_is_in_its_mask() -> None:
    """So a row that takes its token of the unedited logits needs no mask (RowMatchers.take())."""
    grammars, rng, num_taken, num_left_out = make_grammars(), random.Random(1), 0, 0
    for name in usable():
        matcher = grammars.matcher(constraint(name, disable_any_whitespace=rng.random() < 0.5))
        for _ in range(30):
            is_free = not matcher.compute_ff_bytes()
            tokens = range(grammars.num_tokens) if is_free else ()
            taken = [token for token in tokens if matcher.validate_tokens([token])]
            mask = allowed(np.frombuffer(matcher.compute_bitmask(), np.uint32))
            assert not is_free or taken == mask or (matcher.is_stopped(), taken, mask) == (True, [], [EOS])
            for one in rng.sample(taken, min(3, len(taken))) + [rng.randrange(grammars.num_tokens)] * is_free:
                assert matcher.try_consume_tokens([one]) == (one in mask)
                matcher.rollback(int(one in mask))
            num_taken += len(taken)
            num_left_out += not is_free
            token = rng.choice(mask)
            if token == EOS:
                break
            assert matcher.consume_token(token)
    assert num_taken > 10_000
    assert num_left_out > 100
