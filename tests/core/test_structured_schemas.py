"""Every output of a shipped set of schemas parses and validates, and hostile grammars hurt nobody else."""

import json
import random
import re
import time

import jsonschema
import pytest

from ipc.errors import InvalidRequestError
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import FinishReason
from tests.core.driving import Received
from tests.core.test_structured_outputs import Runs, add
from tests.grammar_vocabulary import make_grammars, text_of
from tests.schemas import SCHEMAS
from tools.lab.bench.callers.hostile import hostile_grammar


def outputs(names: list[str], compact: bool, seeds: range) -> list[tuple[str, Received]]:
    """What the fake executor's made-up tokens make of each schema."""
    runs, named = Runs(max_model_len=2000, num_blocks=20_000, max_num_seqs=16), {}
    for seed in seeds:
        for name in names:
            number = len(named)
            params = StructuredOutputsParams(json=SCHEMAS[name], disable_any_whitespace=compact)
            runs.step([add(number + 1000 * seed, params, max_tokens=1500, temperature=1.0)])
            named[number + 1000 * seed] = name
    received = runs.drain()
    return [(named[number], one) for number, one in received.items()]


def check(seeds: range, compact: bool) -> None:
    found = outputs(list(SCHEMAS), compact, seeds)
    assert len(found) == len(seeds) * len(SCHEMAS)
    for name, one in found:
        assert one.finish is FinishReason.STOP, (name, one.failed, text_of(one.tokens)[:200])
        text = text_of(one.tokens)
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=FORMATS)
        if compact:
            assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)), text


@pytest.mark.parametrize("compact", [True, False])
def test_every_output_validates(compact: bool) -> None:
    assert len(SCHEMAS) == 40
    check(range(1), compact)


@pytest.mark.soak
@pytest.mark.parametrize("compact", [True, False])
def test_many_outputs_validate(compact: bool) -> None:
    for seed in range(25):
        check(range(seed, seed + 1), compact)


class Formats(jsonschema.FormatChecker):
    """Those of jsonschema, but for the year 0, which RFC 3339 has and Python's dates do not."""

    def __init__(self) -> None:
        super().__init__()
        self.checkers = jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers

    def check(self, instance: object, format: str) -> None:  # noqa: A002
        if format in ("date", "date-time") and isinstance(instance, str) and instance.startswith("0000-"):
            instance = f"2000{instance[4:]}"  # a leap year, as the year 0 is
        super().check(instance, format)


FORMATS = Formats()


def attack(count: int, seed: int) -> tuple[int, float]:
    """Run so many hostile grammars beside a free request; return how many were compiled and the longest compilation."""
    rng, grammars, compiled, longest = random.Random(seed), make_grammars(), 0, 0.0
    runs = Runs(max_model_len=400, num_blocks=4000, max_num_seqs=16)
    alone = Runs(max_model_len=400, num_blocks=4000)
    free = add(0, None, max_tokens=300)
    alone.step([free])
    runs.step([free])
    for number in range(1, count + 1):
        begin = time.perf_counter()
        try:
            params = StructuredOutputsParams(**hostile_grammar(rng, list(SCHEMAS.values())))  # type: ignore[arg-type]
            grammars.matcher(params)
        except InvalidRequestError:
            longest = max(longest, time.perf_counter() - begin)
            continue
        longest = max(longest, time.perf_counter() - begin)
        compiled += 1
        runs.step([add(number, params, max_tokens=20, temperature=1.0)])
    received = runs.drain()
    assert received[0].tokens == alone.drain()[0].tokens
    assert all(one.is_over for one in received.values())
    return compiled, longest


def test_hostile_grammars_hurt_nobody() -> None:
    compiled, longest = attack(60, seed=1)
    assert 5 < compiled < 55
    assert longest < 30  # seconds, on the slowest machine


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_thousand_hostile_grammars_hurt_nobody(seed: int) -> None:
    attack(100, seed)
