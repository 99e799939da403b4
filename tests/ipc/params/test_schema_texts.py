"""Patterns of ECMA 262 and formats of dates in a schema; and the texts of a pattern that has few."""

import datetime
import itertools
import re

import pytest

from ipc.errors import InvalidRequestError
from ipc.params.schema_names import texts_of
from ipc.params.schema_texts import plain_texts, rust_pattern


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("^[a[b]]$", r"^[a\[b]]$"),
        ("[a-z--b]", r"[a-z\--b]"),
        ("[a&&b~~c]", r"[a\&\&b\~\~c]"),
        ("[-a]", r"[\-a]"),
        ("[a-]", r"[a\-]"),
        (r"[\w-]", r"[\w\-]"),
        (r"[\d-z]", r"[\d\-z]"),
        (r"[+--]", r"[+-\-]"),
        (r"[\]\[]", r"[\]\[]"),
        (r"[\u0041-\x5A]", r"[\u0041-\x5A]"),
        (r"[^^]", r"[^\^]"),
        (r"[\b]", r"[\x08]"),
        (r"[^]", r"[\s\S]"),
        (r"\[a&&b\]", r"\[a&&b\]"),
        (r"\\[a[]", r"\\[a\[]"),
        (r"[\p{L}-z]", r"[\p{L}\-z]"),
        ("^(a|b)+?$", "^(a|b)+?$"),
    ],
)
def test_classes_in_rust_s_notation(pattern: str, written: str) -> None:
    assert rust_pattern(pattern) == written


def test_patterns_everywhere_in_a_schema() -> None:
    schema = {"properties": {"a": {"pattern": "[[]"}}, "patternProperties": {"[[]": {"items": {"pattern": "[~]"}}}}
    assert plain_texts(schema) == {
        "properties": {"a": {"pattern": r"[\[]"}},
        "patternProperties": {r"[\[]": {"items": {"pattern": r"[\~]"}}},
    }
    with pytest.raises(InvalidRequestError, match="has a class that matches nothing"):
        plain_texts({"pattern": "a[]"})


def is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def test_dates_are_days_that_exist() -> None:
    pattern = re.compile(plain_texts({"type": "string", "format": "date"})["pattern"])
    years = [0, 1, 4, 100, 400, 999, 1600, 1900, 1999, 2000, 2023, 2024, 2025, 2096, 2100, 2400, 9999]
    for year, month, day in itertools.product(years, range(14), range(33)):
        text = f"{year:04}-{month:02}-{day:02}"
        assert bool(pattern.search(text)) == is_date(text), text
    for year in range(10_000):
        assert bool(pattern.search(f"{year:04}-02-29")) == is_date(f"{year:04}-02-29"), year


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("10:00:00Z", True),
        ("23:59:59.125+01:30", True),
        ("10:00:60Z", False),
        ("24:00:00Z", False),
        ("10:00:00", False),
        ("10:00:00+24:00", False),
    ],
)
def test_times_have_no_leap_seconds(text: str, is_right: bool) -> None:
    time, moment = (plain_texts({"format": form})["pattern"] for form in ("time", "date-time"))
    assert bool(re.search(time, text)) == is_right
    assert bool(re.search(moment, f"2024-02-29T{text}")) == is_right
    assert not re.search(moment, f"2023-02-29T{text}")


def test_formats_beside_other_rules() -> None:
    both = plain_texts({"format": "date", "pattern": "^2"})
    assert both["pattern"] == "^2"
    assert [*both] == ["pattern", "allOf"]
    assert plain_texts({"format": "hostname"})["maxLength"] == 253
    assert plain_texts({"format": "hostname", "maxLength": 9})["maxLength"] == 9
    assert plain_texts({"format": "uuid"}) == {"format": "uuid"}
    assert plain_texts({"properties": {"format": {"const": "date"}}}) == {"properties": {"format": {"const": "date"}}}


FINITE: list[tuple[str, list[str] | None]] = [
    ("^score$", ["score"]),
    ("^(a|b)$", ["a", "b"]),
    ("^(?:a|b[12])c?$", ["a", "ac", "b1", "b1c", "b2", "b2c"]),
    ("^[a-c]$", ["a", "b", "c"]),
    (r"^a\.b$", ["a.b"]),
    ("^$", [""]),
    ("^((a|)b)?$", ["", "ab", "b"]),
    ("^[|(]$", ["|", "("]),
]
NOT_FINITE = [
    "a",
    "^a",
    "a$",
    "^a|b$",
    "^[(]|b$",
    "^a*$",
    "^a.$",
    r"^\d$",
    "^[^a]$",
    "^a{2}$",
    "^(a$",
    "^a)$",
    "^[a$",
    r"^a\$",
]
NOT_FINITE += [
    "^(?=a)b$",
    "^[a-z]$",
    "^[a-z][a-z]$",
    "^" + "(" * 30 + "a" + ")" * 30 + "$",
    r"^\bfoo$",
    "^a??$",
    "^^a$",
]


@pytest.mark.parametrize(("pattern", "texts"), FINITE)
def test_texts_of_a_pattern(pattern: str, texts: list[str]) -> None:
    found = texts_of(pattern, 20)
    assert found is not None
    assert sorted(found) == sorted(texts)
    assert all(re.search(pattern, text) for text in found)


@pytest.mark.parametrize("pattern", NOT_FINITE)
def test_patterns_without_few_texts(pattern: str) -> None:
    assert texts_of(pattern, 20) is None
