"""Regular expressions of adapters: what fits is what fits in Python's re, and the work for it is bounded."""

import itertools
import random
import re

import pytest

from core.adapters import name_patterns
from core.adapters.name_patterns import NamePatterns
from ipc.errors import ModelFileError

NAMES = [
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "base.decoder.layers.3.fc1",
    "a\n",
    "",
]
#: As adapters have them, and each operation once.
PATTERNS = [
    "q_proj",
    "self_attn.q_proj",
    r"layers\.\d+\.mlp\.down_proj",
    r".*decoder.*\.fc[12]",
    r"^model\.layers\.(0|1|2)\..*",
    r"model.layers.([0-9]|1[0-5]).(self_attn|mlp).(q_proj|down_proj)$",
    r"(?:self_attn|mlp)\.[^.]+?",
    r"\Amodel\b.*\Bproj\Z",
    r"\w+(\.\w+){2,4}",
    r"[\s\S]{0,100000}",
    r"((.?)*)*",
    r"(a|b|\n){1,}",
    r"[^\W\D]\D*\S*",
]


def fits(pattern: str, name: str) -> bool:
    return NamePatterns({pattern: True}, "file").first(name, False)


def test_what_fits_is_what_fits_in_re() -> None:
    for pattern, name in itertools.product(PATTERNS, NAMES):
        assert fits(pattern, name) == bool(re.fullmatch(rf"(.*\.)?({pattern})", name)), (pattern, name)


def test_random_expressions_fit_as_in_re() -> None:
    rng, num_fitting = random.Random(5), 0
    parts = [
        "a",
        "b",
        ".",
        r"\.",
        "[ab]",
        "[^a]",
        r"\d",
        "(a|b.)",
        "(b*a)?",
        "a{2}",
        "(ab){0,2}",
        ".*",
        "b+?",
        "^",
        r"\b",
    ]
    for _ in range(1500):
        pattern = "".join(rng.choices(parts, k=rng.randrange(1, 5)))
        name = "".join(rng.choices("ab.1", k=rng.randrange(7)))
        expected = bool(re.fullmatch(rf"(.*\.)?({pattern})", name))
        assert fits(pattern, name) == expected, (pattern, name)
        num_fitting += expected
    assert 100 < num_fitting < 1400


def test_the_first_that_fits_counts() -> None:
    patterns = NamePatterns({"layers.*q_proj": 1, "q_proj": 2, "v_proj": 3}, "file")
    assert [patterns.first(name, 0) for name in ("layers.1.q_proj", "q_proj", "x.v_proj", "x")] == [1, 2, 3, 0]


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*)*b", "((a*)*)*b", "a*" * 20 + "b"])
def test_expressions_that_are_expensive_for_re_take_few_steps(pattern: str) -> None:
    patterns = NamePatterns({pattern: 1}, "file")
    assert patterns.first("a" * 60, 0) == 0
    assert patterns._num_steps < 300_000


def test_the_work_for_all_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "MAX_STEPS", 3000)
    for pattern in ("(.*)*b", "b"):
        patterns = NamePatterns({pattern: 1}, "config.json: rank_pattern")
        with pytest.raises(ModelFileError, match=r"rank_pattern: .* need over 3000 steps: list the modules"):
            sum(patterns.first("a" * 60, 0) for _ in range(3000))


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?=a)b", "(?<!a)b", "(?i:a)", "(?>a)", "a*+", "("])
def test_what_is_not_supported_is_refused_when_the_file_is_read(pattern: str) -> None:
    with pytest.raises(ModelFileError, match="alpha_pattern: invalid regular expression"):
        NamePatterns({pattern: 1}, "alpha_pattern")
