"""The scheduler against the gold model: equal decisions after every step, nothing lost, everything ends."""

from typing import Any

import msgspec
import pytest

from core.batch import kept_states
from core.batch.carried import Copies
from core.batch.kept_states import KeptStates
from core.execution.executor import ModelInfo
from core.execution.plan import SavedStates, SchedulerOutput
from core.execution.state_slots import num_swap_states
from ipc.options.config import EngineConfig
from ipc.tables.arrays import Ints, Rows
from tests.core.driving import EOS, ByHand
from tests.core.scheduling.gold_machine import ALL, PLAIN, GoldMachine, Options, new_seeds, run, run_share
from tests.core.scheduling.gold_options import GoldWithOptions
from tests.core.scheduling.gold_scheduler import Gold
from tests.core.scheduling.gold_states import LEAST_DISTANCE, LEAST_TOKENS, MOST_GUESSES, GoldWithStates

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


class StatesMachine(GoldMachine):
    """With recurrent layers: the states that each plan copies and stores are those of the gold model, too."""

    gold_class = Gold
    options = PLAIN | {"num_slots": [1, 2, 5, 40], "num_swapped": [0], "kv_window": [0], "num_blocks": [60, 20, 12]}
    gold: GoldWithStates
    num_saved = num_moved = 0

    def begin(self, options: dict[str, Any]) -> None:
        self.num_slots, self.num_swapped = options.pop("num_slots"), options.pop("num_swapped")
        super().begin(options)
        self.gold = GoldWithStates(self.config, self.num_slots, num_swap_states(self.config, 1))

    def hand_of(self, config: EngineConfig) -> ByHand:
        sizes = {"kv_cache_memory_bytes": 2 * (config.max_num_seqs + self.num_slots)}
        self.config = msgspec.structs.replace(config, swap_space_bytes=2 * self.num_swapped, **sizes)
        hand = super().hand_of(self.config)
        info = ModelInfo("", "", "float32", 100, 100, (EOS,), "L2", state_bytes=1)
        hand.scheduler.keep_states(self.config, info)  # type: ignore[arg-type]
        return hand

    def decided(self, plan: SchedulerOutput) -> dict[str, Any]:
        rows, first = plan.rows[plan.saved_rows], self.config.max_num_seqs
        columns = (self.scheduler.table.number[rows], plan.saved_after, plan.saved_slots)
        saved = list(zip(*(column.tolist() for column in columns), strict=True))
        swapped = first + self.num_slots * self.config.enable_prefix_caching

        def slot(number: int) -> int:
            return 0 if number < first else -1 if number >= swapped else number

        pairs = zip(plan.copied_states.tolist(), plan.copied_states_to.tolist(), strict=True)
        moved = [(slot(source), slot(target)) for source, target in pairs]
        type(self).num_saved += len(saved)
        type(self).num_moved += len(moved)
        assert (saved, moved) == (self.gold.saved, self.gold.moved)
        return super().decided(plan)


class SwappedStatesMachine(StatesMachine):
    options = StatesMachine.options | {
        "depth": [1],
        "stages": [1],
        "num_swapped": [9, 2, 1],
        "num_blocks": [12, 8, 20],
        "preemption_mode": ["swap", "swap", "auto"],
        "num_swap_blocks": [60, 12, 3],
        "swap_ns_per_block": [1, 3],
        "recompute_ns_per_token": [1, 2, 9],
    }


@pytest.fixture(autouse=True)
def of_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are kept of prompts as short as those of the machines."""
    monkeypatch.setattr(kept_states, "LEAST_TOKENS", LEAST_TOKENS)
    monkeypatch.setattr(kept_states, "_LEAST_DISTANCE", LEAST_DISTANCE)
    monkeypatch.setattr(kept_states, "MOST_GUESSES", MOST_GUESSES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("machine", "count"),
    [
        (PlainMachine, 50),
        (PagesMachine, 25),
        (SwappedPagesMachine, 20),
        (OptionsMachine, 35),
        (StatesMachine, 25),
        (SwappedStatesMachine, 20),
    ],
    ids=["plain", "pages", "swapped pages", "options", "states", "swapped states"],
)
def test_decisions_equal_the_gold_models(machine: type[GoldMachine], count: int) -> None:
    run_share(machine, count)  # make soak runs tens of thousands
    if issubclass(machine, StatesMachine):
        assert machine.num_saved > 99
        assert machine.num_moved > 0


@pytest.mark.parametrize("fault", ["late", "older first", "of another"])
def test_planted_faults_of_states_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save, begin, add = KeptStates.save, KeptStates.begin, Copies.add

    def late(self: KeptStates, rows: Rows, counts: Ints) -> SavedStates | None:
        saved = save(self, rows, counts)
        return None if saved is None else saved._replace(after=saved.after - 1)

    def begin_without_use(self: KeptStates, *arguments: Any) -> None:
        order = list(self._slots)
        begin(self, *arguments)
        self._slots = {content: self._slots[content] for content in order}

    match fault:
        case "late":
            monkeypatch.setattr(KeptStates, "save", late)
        case "older first":
            monkeypatch.setattr(KeptStates, "begin", begin_without_use)
        case "of another":
            monkeypatch.setattr(Copies, "add", lambda self, source, target: add(self, source - 1, target))
    machine = SwappedStatesMachine if fault == "of another" else StatesMachine
    with pytest.raises(AssertionError):
        run(machine, range(40))


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("machine", "share"),
    [
        (PlainMachine, 1 / 3),
        (OptionsMachine, 1 / 3),
        (PagesMachine, 1 / 12),
        (SwappedPagesMachine, 1 / 12),
        (StatesMachine, 1 / 12),
        (SwappedStatesMachine, 1 / 12),
    ],
    ids=["plain", "options", "pages", "swapped pages", "states", "swapped states"],
)
def test_soak_decisions_equal_the_gold_models(machine: type[GoldMachine], share: float) -> None:
    """100,000 examples in all; SCHEDULER_EXAMPLES=n runs that many."""
    run(machine, new_seeds(share, 100_000))
