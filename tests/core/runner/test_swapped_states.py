"""The recurrent states of preempted requests that are copied to the host: no bit depends on it."""

import numpy as np
import pytest

from core.batch.carried import Copies
from core.runner.state_rows import DraftStates, RowStates
from core.scheduling.swapped_states import SwappedStates
from ipc.options.speculation import SpeculativeConfig
from ipc.tables.arrays import Bools, Int32s
from kernels.elements import BFLOAT16
from tests.core.runner.invariance import Run, difference, request, run, tiny_model
from tests.core.runner.invariance_scenarios import PROMPT, Preempting

RECURRENT = ("short convolution", "gated delta", "state space")
SHORT = PROMPT[:150]


def swapped(kind: str, steps: set[int] | None = None, **settings: object) -> Run:
    """SHORT in chunks, preempted after these steps, or after every one."""
    given = {"budget": 48, "max_tokens": 12, "num_blocks": 40, "num_swap_blocks": 40, "rows": 3, **settings}
    return run(tiny_model(BFLOAT16, kind), SHORT, between=Preempting(steps, forgets=True), **given)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_request_resumes_from_its_own_state(kind: str, *, prefix_caching: bool) -> None:
    """After each chunk of its prompt and each token, nothing is computed again."""
    got = swapped(kind, prefix_caching=prefix_caching)
    assert difference(got, run(tiny_model(BFLOAT16, kind), SHORT, max_tokens=12)) == ""
    stats = got.recorder.scheduler.stats
    assert (got.num_preemptions, stats.num_recomputed_tokens) == (3 + 11, 0)
    assert stats.num_swapped_in_blocks == stats.num_swapped_out_blocks > 0


NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, step_ns=(10**6,) * 8)


def test_states_of_several_requests_wait_at_once() -> None:
    """Four rows have too few blocks. Preempted ones resume in other rows, in another order, with drafts or without."""
    model = tiny_model(BFLOAT16, "gated delta")
    crowd = [request(n, PROMPT[n : 60 + 9 * n], 40, 0.7) for n in range(1, 9)]
    alone = run(model, SHORT, max_tokens=24)
    for speculative in (None, NGRAM):
        settings = {"rows": 4, "num_blocks": 28, "num_swap_blocks": 60, "speculative": speculative}
        got = run(model, SHORT, neighbours=crowd, max_tokens=24, **settings)
        assert difference(got, alone) == ""
        stats = got.recorder.scheduler.stats
        assert stats.num_swapped_in_blocks > 20
        assert (speculative is None) == (stats.num_draft_tokens == 0)


def test_a_row_whose_step_is_in_flight_is_recomputed() -> None:
    """Its state is not yet that of the tokens that its copy would have."""
    got = swapped("gated delta", {5}, depth=2)
    assert difference(got, run(tiny_model(BFLOAT16, "gated delta"), SHORT, max_tokens=12)) == ""
    assert (got.num_preemptions, got.recorder.scheduler.stats.num_swapped_out_blocks) == (1, 0)


@pytest.mark.parametrize("fault", ["late", "of another"])
def test_a_wrong_state_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state one token later than the copied blocks, and the state of another slot, change bits."""
    if fault == "late":
        monkeypatch.setattr(SwappedStates, "can_take", lambda *_: True)
    else:
        right = Copies.add
        monkeypatch.setattr(Copies, "add", lambda self, source, target: right(self, source, max(0, target - 1)))
    depth = 2 if fault == "late" else 1
    with pytest.raises(AssertionError):
        check("gated delta", {5}, depth)


def check(kind: str, steps: set[int], depth: int) -> None:
    """Compare a run in which the request is preempted after these steps with one in which it is alone."""
    alone = run(tiny_model(BFLOAT16, kind), SHORT, max_tokens=12)
    assert difference(swapped(kind, steps, depth=depth), alone) == ""


def test_the_state_of_a_wrong_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all drafts were right, a row keeps the state after the last one."""
    accept = RowStates.accept

    def keep(self: RowStates, drafted: DraftStates, counts: Int32s, live: Bools | None = None) -> None:
        ends = np.append(drafted.begins[1:], len(drafted.saved))
        every = counts.copy()
        every[drafted.in_plan] = ends - drafted.begins
        accept(self, drafted, every, live)

    monkeypatch.setattr(RowStates, "accept", keep)
    alone = run(tiny_model(BFLOAT16, "gated delta"), SHORT * 2, max_tokens=24)
    with pytest.raises(AssertionError, match=r"differ at output positions|other logits again"):
        assert difference(run_with_drafts(), alone) == ""


def run_with_drafts() -> Run:
    """Run SHORT twice as one prompt, with drafts, preempted and swapped now and then."""
    between = Preempting({4, 9}, forgets=False)
    settings = {"num_blocks": 40, "num_swap_blocks": 40, "rows": 3, "speculative": NGRAM}
    return run(tiny_model(BFLOAT16, "gated delta"), SHORT * 2, max_tokens=24, between=between, **settings)


def test_drafts_and_swapping_change_no_bit() -> None:
    got = run_with_drafts()
    assert difference(got, run(tiny_model(BFLOAT16, "gated delta"), SHORT * 2, max_tokens=24)) == ""
    stats = got.recorder.scheduler.stats
    assert 0 <= stats.num_accepted_tokens < stats.num_draft_tokens
    assert got.num_preemptions == 2
    assert stats.num_swapped_out_blocks > 0
