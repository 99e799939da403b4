"""The scheduler against the gold model: equal decisions after every step, nothing lost, everything ends."""

import pytest

from tests.core.scheduling.gold_machine import ALL, PLAIN, GoldMachine, Options, new_seeds, run
from tests.core.scheduling.gold_options import GoldWithOptions
from tests.core.scheduling.gold_scheduler import Gold

PAGES: Options = {
    **PLAIN,
    "num_blocks": [16, 12, 24, 60],
    "max_model_len": [20, 30, 60],
    "kv_window": [1, 5, 9],
    "kv_page_blocks": [1, 2, 3, 6],
}


class PlainMachine(GoldMachine):
    gold_class = Gold
    options = PLAIN


class PagesMachine(GoldMachine):
    gold_class = Gold
    options = PAGES

    def check_bounds(self) -> None:
        """There is no bound: who starts with all blocks gives some back, and needs others."""


class SwappedPagesMachine(PagesMachine):
    gold_class = GoldWithOptions
    options = PAGES | {
        "preemption_mode": ["swap", "swap", "auto"],
        "num_swap_blocks": [60, 12, 3],
        "swap_ns_per_block": [1, 3],
        "recompute_ns_per_token": [1, 2, 9],
    }


class OptionsMachine(GoldMachine):
    gold_class = GoldWithOptions
    options = ALL


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("machine", "count"),
    [(PlainMachine, 50), (PagesMachine, 25), (SwappedPagesMachine, 20), (OptionsMachine, 35)],
    ids=["plain", "pages", "swapped pages", "options"],
)
def test_decisions_equal_the_gold_models(machine: type[GoldMachine], count: int) -> None:
    run(machine, range(count))  # make soak runs tens of thousands


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("machine", "share"),
    [(PlainMachine, 1 / 3), (OptionsMachine, 1 / 2), (PagesMachine, 1 / 12), (SwappedPagesMachine, 1 / 12)],
    ids=["plain", "options", "pages", "swapped pages"],
)
def test_soak_decisions_equal_the_gold_models(machine: type[GoldMachine], share: float) -> None:
    """100,000 examples in all; SCHEDULER_EXAMPLES=n runs that many."""
    run(machine, new_seeds(share, 100_000))
