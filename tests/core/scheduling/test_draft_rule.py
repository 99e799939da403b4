"""DraftRule: drafts are taken while they raise the tokens that a step keeps per nanosecond."""

import itertools

import numpy as np
import pytest

from core.scheduling.draft_rule import LARGEST_STEP, MAX_STEP_DRAFTS, OVERHEAD_NS, AllDrafts, DraftRule

MS = 1_000_000
#: A memory-bound start, and from 16 tokens on as long as there are tokens.
BEND = (10 * MS, 10 * MS, 11 * MS, 12 * MS, 16 * MS, 32 * MS, 64 * MS, 128 * MS)


def cost(num_tokens: int) -> float:
    sizes = [0] + [2**n for n in range(len(BEND))]
    return float(np.interp(num_tokens, sizes, [0, *BEND]))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_keeps_more(seed: int) -> None:
    """Every number of drafts of three rows is tried."""
    rng = np.random.default_rng(seed)
    chances, counts, num_tokens = rng.random(3) * 0.98, rng.integers(0, 5, 3), int(rng.integers(3, 30))
    limit = int(rng.integers(1, 12))

    def rate(chosen: tuple[int, ...]) -> float:
        kept = num_tokens + sum(chances[row] ** (place + 1) for row, n in enumerate(chosen) for place in range(n))
        return float(kept / (cost(num_tokens + sum(chosen)) + OVERHEAD_NS * (sum(chosen) > 0)))

    chosen = tuple(DraftRule(BEND).choose(num_tokens, chances, counts, limit).tolist())
    choices = [one for one in itertools.product(*(range(n + 1) for n in counts)) if sum(one) <= limit]
    assert chosen in choices
    assert rate(chosen) == pytest.approx(max(map(rate, choices)), rel=1e-9)


def test_one_request_gets_all_and_a_full_batch_none() -> None:
    rule = DraftRule(BEND)
    assert rule.choose(1, np.array([0.7]), np.array([7]), 100).tolist() == [7]
    assert rule.choose(1, np.array([0.02]), np.array([7]), 100).tolist() == [0]
    assert not rule.may_pay(32, 0.9)
    assert rule.may_pay(1, 0.1)
    assert not rule.may_pay(LARGEST_STEP + 1, 1.0)
    assert not rule.may_pay(0, 1.0)


def test_may_pay_never_denies_what_choose_would_take() -> None:
    rule = DraftRule(BEND)
    for num_tokens, chance in itertools.product((1, 2, 5, 9, 15, 16, 17, 31, 100, 500), (0.05, 0.3, 0.6, 0.9, 0.99)):
        chosen = rule.choose(num_tokens, np.full(40, chance), np.full(40, 7), 1000)
        assert rule.may_pay(num_tokens, chance) or not chosen.any(), (num_tokens, chance)


def test_given_drafts_are_all_taken_row_after_row() -> None:
    rule, chances = AllDrafts(after_prompts=True), np.full(3, 1e-9)
    assert rule.may_pay(5000, 0.0)
    assert not rule.may_pay(0, 1.0)
    assert rule.choose(9, chances, np.array([300, 0, 200]), 400).tolist() == [300, 0, 100]
    assert rule.choose(9, chances, np.array([1, 2, 3]), 400).tolist() == [1, 2, 3]
    assert rule.choose(9, chances, np.array([1, 2, 3]), 0).tolist() == [0, 0, 0]


def test_without_durations_all_are_taken() -> None:
    rule = DraftRule(())
    assert rule.choose(9, np.array([0.1, 0.9]), np.array([3, 2]), 100).tolist() == [3, 2]
    assert rule.choose(9, np.array([0.1, 0.9]), np.array([3, 2]), 3).tolist() == [1, 2]
    assert rule.choose(9, np.full(60, 0.5), np.full(60, 7), 1000).sum() == MAX_STEP_DRAFTS


def test_durations_never_fall_and_go_on_rising() -> None:
    """Durations of 4, 3, 8 and 6 us: noise must not make a draft seem to cost less than nothing."""
    rule = DraftRule((4000, 3000, 8000, 6000))
    assert rule.may_pay(2, 0.99)
    flat = DraftRule((MS,) * 8)
    assert flat.choose(1, np.array([0.9]), np.array([32]), 100).tolist() == [32]
    assert DraftRule(BEND).choose(200, np.array([0.999]), np.array([32]), 100).tolist() == [0]


def test_a_disturbed_step_of_one_token_does_not_make_drafts_look_cheap() -> None:
    """A step of 1 token, measured three times as long as it takes, counts as long as that of 2."""
    rule, right = DraftRule((30 * MS, *BEND[1:])), DraftRule(BEND)
    for chance in (0.02, 0.05, 0.2, 0.8):
        chosen = [one.choose(1, np.array([chance]), np.array([7]), 100).tolist() for one in (rule, right)]
        assert chosen[0] == chosen[1]


def test_drafts_that_take_as_long_as_the_steps_they_save_never_pay() -> None:
    assert DraftRule(BEND).can_pay(4)
    assert DraftRule(BEND, 15 * MS).can_pay(4)  # five tokens in 26 ms
    assert not DraftRule(BEND, 60 * MS).can_pay(4)
    assert not DraftRule(tuple(MS * 2**n for n in range(8))).can_pay(4)


@pytest.mark.parametrize("seed", range(20))
def test_the_turn_that_a_row_loses_is_counted(seed: int) -> None:
    """No shorter list of the likeliest drafts keeps more in this step and the next, which rows with drafts miss."""
    rng = np.random.default_rng(seed)
    chances, counts, num_tokens = rng.random(4), rng.integers(1, 5, 4), int(rng.integers(4, 12))

    def rate(chosen: list[int]) -> float:
        kept = sum(chances[row] ** (place + 1) for row, n in enumerate(chosen) for place in range(n))
        left = num_tokens - np.count_nonzero(chosen)
        return float((num_tokens + kept + left) / (cost(num_tokens + sum(chosen)) + cost(left) + OVERHEAD_NS))

    rule, free = DraftRule(BEND, loses_turn=True), DraftRule((), loses_turn=True)
    chosen = rule.choose(num_tokens, chances, counts, 100).tolist()
    others = [free.choose(num_tokens, chances, counts, limit).tolist() for limit in range(1, int(counts.sum()) + 1)]
    best = max(others, key=rate)
    if rate(best) > num_tokens / cost(num_tokens):
        assert rate(chosen) == pytest.approx(rate(best), rel=1e-9)
    else:
        assert not any(chosen)


@pytest.mark.parametrize("seed", range(20))
def test_where_all_rows_have_drafts_the_step_stands_alone(seed: int) -> None:
    """Then it takes what it takes with nothing to overlap with; else the next one overlaps with it."""
    rng = np.random.default_rng(seed)
    num_rows, alone = int(rng.integers(1, 4)), tuple(30 * MS + one for one in BEND)
    chances, counts = rng.random(num_rows) ** 0.25, rng.integers(1, 8, num_rows)

    def rate(chosen: tuple[int, ...]) -> float:
        drafted = np.count_nonzero(chosen)
        kept = sum(chances[row] ** (place + 1) for row, n in enumerate(chosen) for place in range(n))
        if not drafted:
            return num_rows / cost(num_rows)
        size, left = num_rows + sum(chosen), num_rows - drafted
        taken = cost(size) + cost(left) if left else cost(size) + 30 * MS
        return float((num_rows + kept + left) / (taken + OVERHEAD_NS))

    rule = DraftRule(BEND, 0, alone, loses_turn=True)
    free = DraftRule((), loses_turn=True)
    lists = [free.choose(num_rows, chances, counts, limit) for limit in range(1, int(counts.sum()) + 1)]
    chosen = tuple(rule.choose(num_rows, chances, counts, 100).tolist())
    best = max(rate(tuple(one.tolist())) for one in lists)
    assert rate(chosen) == pytest.approx(max(best, rate((0,) * num_rows)), rel=1e-9)
    assert rule.may_pay(num_rows, float(chances.max())) or not any(chosen)


#: Of an H100 with a slow host, in ns: the demo model, whose steps last as long as the host's work, and an 8B's shape.
DEMO = DraftRule((1_330_000,) * 4 + (1_390_000,) * 4, 0, (2_700_000,) * 3 + (2_750_000,) * 5, loses_turn=True)
EIGHT_B = DraftRule((6_600_000,) * 8, 0, (8_500_000,) * 8, loses_turn=True)


@pytest.mark.parametrize("num_rows", [1, 2, 8])
@pytest.mark.parametrize(("rule", "chance", "pays"), [(DEMO, 0.5, False), (DEMO, 0.7, True), (EIGHT_B, 0.4, True)])
def test_drafts_pay_for_the_overlap_that_is_lost(rule: DraftRule, chance: float, pays: bool, num_rows: int) -> None:
    """A verifying step takes more than twice as long as a plain one of the demo model: so many more tokens are kept."""
    chosen = rule.choose(num_rows, np.full(num_rows, chance), np.full(num_rows, 7), 128)
    assert chosen.any() == pays
    assert rule.may_pay(num_rows, chance) == pays, "no proposer is asked in vain"


@pytest.mark.parametrize("rule", [DEMO, EIGHT_B, DraftRule(BEND, 5 * MS, loses_turn=True)])
def test_where_turns_are_lost_may_pay_denies_nothing_that_pays(rule: DraftRule) -> None:
    for num_tokens, chance in itertools.product((1, 2, 5, 9, 16, 31, 100, 512), np.arange(0.05, 1, 0.05).tolist()):
        for num_rows in (1, max(1, num_tokens // 2), num_tokens):
            chosen = rule.choose(num_tokens, np.full(num_rows, chance), np.full(num_rows, 7), 1000)
            assert rule.may_pay(num_tokens, chance) or not chosen.any(), (num_tokens, num_rows, chance)


def test_alone_a_row_loses_no_turn() -> None:
    """Nobody else would have it: the next step is not run. Among seven others a draft must save two steps."""
    rule, usual = DraftRule(BEND, loses_turn=True), DraftRule(BEND)
    for chance in (0.02, 0.1, 0.5, 0.9):
        alone = [one.choose(1, np.array([chance]), np.array([7]), 100).tolist() for one in (rule, usual)]
        assert alone[0] == alone[1]
    flat = (10 * MS,) * 8
    assert DraftRule(flat).choose(8, np.array([0.6]), np.array([1]), 100).tolist() == [1]
    assert DraftRule(flat, loses_turn=True).choose(8, np.array([0.6]), np.array([1]), 100).tolist() == [0]
    assert DraftRule(flat, loses_turn=True).choose(8, np.array([0.9]), np.array([7]), 100).tolist() == [7]
