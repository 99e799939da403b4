"""RowMatchers: masks behind drafts are those of a row that has them as tokens, and drafts leave no trace."""

import json
import random

import numpy as np
import pytest

from core.grammars.matchers import RowMatchers
from ipc.errors import InvalidRequestError
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.tables.arrays import Int32s
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, allowed, make_grammars, schema, structured, tokenizer
from tests.placed import PREFIX

GRAMMARS = make_grammars()
PARAMS = [
    structured(
        json=schema(name={"type": "string", "maxLength": 5}, age={"type": "integer"}), disable_any_whitespace=True
    ),
    structured(json_object=True),
    structured(regex="[a-z]{2,9}(00)*"),
    structured(choice=["yes", "no", "nothing"]),
]


def one_mask(params: StructuredOutputsParams, output: list[int]) -> list[int]:
    matchers = RowMatchers(GRAMMARS, 1)
    matchers.add(0, params, np.array(output, np.int32))
    return allowed(matchers.masks(np.array([0]))[0])


def some_output(params: StructuredOutputsParams, rng: random.Random, count: int) -> list[int]:
    """Tokens that the grammar allows, up to EOS."""
    matcher, output = GRAMMARS.matcher(params), list[int]()
    while len(output) < count and (not output or output[-1] != EOS):
        output.append(rng.choice(allowed(np.frombuffer(matcher.compute_bitmask(), np.uint32))))
        assert matcher.consume_token(output[-1])
    return output


@pytest.mark.parametrize("number", range(12))
def test_masks_behind_drafts(number: int) -> None:
    rng = random.Random(number)
    matchers, rows, drafts, whole = RowMatchers(GRAMMARS, 8), [], [], []
    for row in rng.sample(range(8), 5):
        params, count = rng.choice(PARAMS), rng.randrange(5)
        output = some_output(params, rng, 20)
        known, draft = output[:count], output[count : count + rng.randrange(6)]
        if known and known[-1] == EOS:
            continue
        matchers.add(row, params, np.array(known, np.int32))
        rows.append(row)
        drafts.append(draft)
        whole.append((params, known))
    masks = matchers.masks(np.array(rows), drafts).copy()
    index = 0
    for (params, known), draft in zip(whole, drafts, strict=True):
        for end in range(len(draft) + 1):
            if draft[:end][-1:] != [EOS]:  # nothing follows it
                assert allowed(masks[index]) == one_mask(params, known + draft[:end])
            index += 1
    assert index == len(masks)
    after = matchers.masks(np.array(rows))
    assert [allowed(mask) for mask in after] == [one_mask(params, known) for params, known in whole]


def test_a_draft_that_is_not_allowed_has_nothing_behind_it_and_changes_nothing() -> None:
    matchers = RowMatchers(GRAMMARS, 2)
    params = structured(choice=["yes", "no"])
    matchers.add(1, params, np.zeros(0, np.int32))
    yes, bad = tokenizer().encode("yes").ids[0], tokenizer().encode("x").ids[0]
    before = allowed(matchers.masks(np.array([1]))[0])
    masks = matchers.masks(np.array([1]), [[bad, yes, bad]])
    assert [allowed(mask) for mask in masks] == [before, [], [], []]
    assert allowed(matchers.masks(np.array([1]))[0]) == before
    assert matchers.failure(0) is None


def test_forced_tokens_are_those_of_the_tokenizer() -> None:
    matchers = RowMatchers(GRAMMARS, 2)
    matchers.add(0, PARAMS[0], np.zeros(0, np.int32))
    counts, forced = matchers.drafts(np.array([1, 0]))
    assert counts is not None
    assert counts.tolist() == [0, len(forced)]
    assert tokenizer().decode(forced.tolist()).startswith('{"name')
    assert forced.tolist() == tokenizer().encode('{"name":"').ids[: len(forced)]
    matchers.append(np.array([0] * len(forced)), forced)
    assert matchers.drafts(np.array([0]))[0] is None
    matchers.add(1, structured(choice=["yes"]), np.array(tokenizer().encode("yes").ids, np.int32))
    assert matchers.drafts(np.array([0, 1]))[1].tolist() == [EOS]


def test_a_row_is_where_its_output_has_brought_it() -> None:
    rng = random.Random(3)
    for params in PARAMS:
        output = some_output(params, rng, 12)
        output = output[:-1] if output[-1] == EOS else output
        matchers = RowMatchers(GRAMMARS, 4)
        matchers.add(2, params, np.array(output[:3], np.int32))
        for token in output[3:]:
            matchers.append(np.array([1, 2]), np.array([0, token], np.int32))
        assert allowed(matchers.masks(np.array([2]))[0]) == one_mask(params, output)
        matchers.remove(2)
        matchers.remove(2)
        assert len(matchers) == 0


def test_an_output_that_the_grammar_refuses_fails_the_row() -> None:
    """A client said that it has been delivered, say."""
    matchers = RowMatchers(GRAMMARS, 2)
    matchers.add(0, structured(choice=["yes"]), np.array(tokenizer().encode("no").ids, np.int32))
    assert allowed(matchers.masks(np.array([0]))[0]) == []
    assert (matchers.failure(0) or "").startswith("structured_outputs: ")


def test_a_matcher_that_reaches_a_limit_is_made_again_and_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the limit is a token that the grammar refuses, so the new matcher fails too."""
    made = []
    monkeypatch.setattr(f"{PREFIX}core.grammars.matchers.is_of_lexer", lambda matcher: True)
    monkeypatch.setattr(GRAMMARS, "renew", lambda params: made.append(params) or GRAMMARS.matcher(params))
    matchers = RowMatchers(GRAMMARS, 1)
    matchers.add(0, PARAMS[3], np.array([5, 5], np.int32))
    for _ in range(4):
        assert allowed(matchers.masks(np.array([0]))[0]) == []
    assert len(made) == 2


def test_a_matcher_that_shares_nothing_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, made = make_grammars(), []
    monkeypatch.setattr(f"{PREFIX}core.grammars.matchers.is_of_lexer", lambda matcher: True)
    monkeypatch.setattr(grammars, "renew", lambda params: made.append(params) or grammars.matcher(params))
    matchers = RowMatchers(grammars, 2)
    matchers.add(0, PARAMS[3], np.array([5, 5], np.int32))
    assert allowed(matchers.masks(np.array([0]))[0]) == []
    assert not made
    matchers.add(1, PARAMS[3], np.zeros(0, np.int32))
    assert allowed(matchers.masks(np.array([0]))[0]) == []
    assert made == [PARAMS[3]]


#: A schema of which one branch fails at its first token: more than 2,000 rules would begin there.
MANY = [
    {"type": "object", "properties": {f"{name}{index}": {} for index in range(300)}, "additionalProperties": False}
    for name in "pq"
]
EITHER = structured(json=json.dumps({"type": "array", "items": {"anyOf": [{"type": "null"}, *MANY]}}))


@pytest.mark.parametrize("others", [0, 2])
def test_a_token_that_is_only_tried_fails_no_row_and_has_nothing_compiled(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a draft or a token of unedited logits."""
    grammars, row = make_grammars(), np.array([0])
    monkeypatch.setattr(grammars, "renew", lambda params: pytest.fail("compiled in a step"))
    matchers = RowMatchers(grammars, 1 + others)
    for number in range(1 + others):
        matchers.add(number, EITHER, np.array(tokenizer().encode("[").ids, np.int32))
    before, wrong = allowed(matchers.masks(row)[0]), tokenizer().encode("{").ids
    assert wrong[0] in before
    for _ in range(4):
        first, behind = matchers.masks(row, [wrong])
        assert (allowed(first), allowed(behind)) == (before, [])
    assert matchers.take([0], wrong) == ([], [0])
    assert allowed(matchers.masks(row)[0]) == before
    right = tokenizer().encode("null]").ids
    matchers.append(np.zeros(len(right), np.int64), np.array(right, np.int32))
    assert allowed(matchers.masks(row)[0]) == [EOS]


def test_a_text_that_fails_its_parser_has_nothing_compiled_though_others_share_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = make_grammars()
    monkeypatch.setattr(grammars, "renew", lambda params: pytest.fail("compiled in a step"))
    matchers = RowMatchers(grammars, 2)
    for number in range(2):
        matchers.add(number, EITHER, np.array(tokenizer().encode("[{").ids, np.int32))
    assert allowed(matchers.masks(np.array([0]))[0]) == []
    assert "Current row has" in (matchers.failure(0) or "")


@pytest.mark.parametrize(("count", "num_drafts"), [(100, 8), (600, 3), (3000, 0)])
def test_a_long_forced_text_is_divided_a_piece_at_a_time(
    count: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mask has it divided, so what it costs must not grow with a number in the grammar; nor may drafts, which
    each need a mask."""
    lengths: list[int] = []

    def divide(text: str) -> list[int]:
        lengths.append(len(text))
        return tokenizer().encode(text, add_special_tokens=False).ids

    monkeypatch.setattr(f"{PREFIX}core.grammars.token_files._divide", lambda built: divide)
    text, matchers = "yes" * count, RowMatchers(make_grammars(), 1)
    matchers.add(0, structured(choice=[text]), np.zeros(0, np.int32))
    tokens: list[int] = []
    for _ in range(4):
        _, forced = matchers.drafts(np.array([0]))
        assert len(forced) == num_drafts
        tokens += (one := allowed(matchers.masks(np.array([0]))[0]))
        assert forced.tolist()[:1] == one[:num_drafts]
        matchers.append(np.array([0]), np.array(one, np.int32))
    assert tokens == tokenizer().encode("yes" * 4).ids
    assert max(lengths) <= 512


def test_behind_a_text_that_is_too_long_nothing_is_allowed_yet() -> None:
    """llguidance allowed what follows such a text in the place of its beginning."""
    long, row = "a" * 17_000, np.array([0])
    with pytest.raises(InvalidRequestError, match="more than 16,384 characters at once"):
        GRAMMARS.matcher(structured(choice=[f"{long}b", f"{long}c"]))
    matchers, ten = RowMatchers(make_grammars(), 1), "l " * 10
    later = f'start: "no" | "x" rest\nrest: {ten}"b" | {ten}"c"\nl: "{long[:1700]}"'
    matchers.add(0, structured(grammar=later), np.zeros(0, np.int32))
    (begin,) = tokenizer().encode("x").ids
    first, behind = matchers.masks(row, [[begin]])
    assert begin in allowed(first)
    assert allowed(behind) == []
    matchers.append(row, np.array([begin], np.int32))
    assert allowed(matchers.masks(row)[0]) == []
    assert "more than 16,384 characters at once" in (matchers.failure(0) or "")


def test_letters_of_all_scripts_are_within_the_limits() -> None:
    """A class such as \\p{L} in a pattern takes most of a mask's fuel (core/grammars/compilation.py)."""
    name = {"type": "string", "pattern": r"^(\p{Lu}\p{L}{1,20}[ '-]){1,3}\p{Lu}\p{Ll}+$"}
    for seed in range(5):
        output = some_output(structured(json=schema(name=name)), random.Random(seed), 25)
        assert len(output) == 25 or output[-1] == EOS


def test_a_forced_text_without_end_fails_the_row_and_costs_the_step_little() -> None:
    """It begins behind a choice, so nothing refuses the grammar when it is compiled."""
    many = 'start: ("a" | "b") a{30}\na: b{30}\nb: c{30}\nc: "hello world"\n'
    matchers = RowMatchers(make_grammars(), 1)
    matchers.add(0, structured(grammar=many), np.array(tokenizer().encode("a").ids, np.int32))
    assert allowed(matchers.masks(np.array([0]))[0]) == []
    assert "more than 16,384 characters at once" in (matchers.failure(0) or "")


@pytest.mark.parametrize("number", range(8))
def test_a_token_that_is_taken_is_in_the_mask_and_consumed_once(number: int) -> None:
    """Where it is not allowed, and where a text is forced, nothing is taken, and nothing has changed."""
    rng, num_taken = random.Random(number), 0
    for _ in range(25):
        params = rng.choice(PARAMS)
        output = some_output(params, rng, rng.randrange(8))
        matchers, row = RowMatchers(GRAMMARS, 2), np.array([1])
        matchers.add(1, params, np.array(output, np.int32))
        whole = one_mask(params, output)
        token = rng.choice([*whole, EOS, rng.randrange(VOCAB_SIZE), VOCAB_SIZE + 5, -1])
        is_taken = matchers.take([1], [token]) == ([], [])
        assert is_taken <= (token in whole)
        num_taken += is_taken
        if not is_taken:
            assert allowed(matchers.masks(row)[0]) == whole
            token = rng.choice(whole)
        matchers.append(np.array([0, 1]), np.array([3, token], np.int32))
        fresh = RowMatchers(GRAMMARS, 2)
        fresh.add(1, params, np.array([*output, token], np.int32))
        assert_equal_drafts(matchers.drafts(row), fresh.drafts(row))
        assert allowed(matchers.masks(row)[0]) == allowed(fresh.masks(row)[0])
    assert num_taken > 3


def assert_equal_drafts(got: tuple[Int32s | None, Int32s], expected: tuple[Int32s | None, Int32s]) -> None:
    assert np.array_equal(got[1], expected[1])
    assert (got[0] is None) == (expected[0] is None)


def test_a_row_that_has_taken_its_last_token_is_forgotten_as_others_are() -> None:
    """Another request in the row begins where its own grammar does."""
    matchers, row = RowMatchers(GRAMMARS, 1), np.array([0])
    matchers.add(0, structured(regex="[a-z]*"), np.zeros(0, np.int32))
    (letter,) = tokenizer().encode("b").ids
    assert matchers.take([0], [letter]) == ([], [])
    matchers.remove(0)
    matchers.add(0, structured(regex="b[a-z]*"), np.zeros(0, np.int32))
    assert matchers.take([0], [letter]) == ([], [0])  # it is forced
    matchers.append(row, np.array([letter], np.int32))
    assert allowed(matchers.masks(row)[0]) == one_mask(structured(regex="b[a-z]*"), [letter])
