"""Layers with a recurrent state on a device: near their definition in NumPy, and no bit depends on steps or company."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from core.models.config import RecurrentParts
from kernels.recurrence import RecurrenceParts, StateRows, recur
from kernels.triton.recurrence import TritonRecurrence, decoding_states, device_states
from tests.core.runner.invariance_kinds import KINDS
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE

OFFSET = 16


def small(kind: str, **changes: Any) -> RecurrenceParts:
    """Random constants for a layer of a kind of tests/core/runner/invariance_kinds.py."""
    own = KINDS[kind].recurrent
    assert isinstance(own, RecurrentParts)
    sizes, draw = own.sizes._replace(**changes), np.random.default_rng(3)

    def random(*shape: int) -> Any:
        return draw.standard_normal(shape).astype(np.float32)

    heads = sizes.num_heads
    return RecurrenceParts(
        sizes,
        random(sizes.taps, sizes.channels),
        random(sizes.channels) if own.has_bias else None,
        rates=np.abs(random(heads)),
        step_biases=random(heads),
        skips=random(heads) if sizes.kind == "state space" else None,
        norm=random(sizes.out_width if sizes.kind == "state space" else sizes.value_dim) if heads else None,
        eps=1e-5,
        steps=(0.1, 2.0),
        most_beta=own.most_beta,
    )


def run(parts: RecurrenceParts, x: torch.Tensor, counts: list[int], states: torch.Tensor, **options: Any) -> Any:
    """Results of a step: request i has its next counts[i] tokens of x. starts: their first positions."""
    starts, rows = options.get("starts", [0] * len(counts)), options.get("rows", range(len(counts)))
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    requests = StateRows(states, np.array(rows), np.cumsum([0, *counts]), options.get("saves"))  # type: ignore[arg-type]
    layer = TritonRecurrence(parts, OFFSET, DEVICE)
    return layer(x.to(DEVICE), torch.from_numpy(positions).to(DEVICE), device_states(requests, DEVICE)).cpu()


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("kind", ["short convolution", "gated delta", "state space"])
def test_results_are_those_of_the_definition(kind: str, turns: bool) -> None:
    parts = small(kind, takes_turns=turns)
    sizes, size = parts.sizes, OFFSET + parts.sizes.state_size
    x = torch.randn(12, sum(sizes.parts), generator=torch.Generator().manual_seed(1))
    expected = np.concatenate(
        [recur(parts, x[part].numpy(), np.zeros(size, np.float32)) for part in (slice(0, 7), slice(7, 12))]
    )
    states = torch.full((4, size), torch.nan, device=DEVICE)
    whole = run(parts, x, [7, 5], states)
    np.testing.assert_allclose(whole.numpy(), expected, rtol=2e-4, atol=2e-5)
    assert states[:2, :OFFSET].isnan().all(), "another layer's"
    assert states[2:].isnan().all(), "another request's"
    other = torch.full((4, size), torch.nan, device=DEVICE)
    saves = np.array([-1, 3, -1])
    begin = run(parts, torch.cat((x[:1], x[7:9])), [1, 2], other, rows=[0, 1], saves=np.array([-1, -1, -1]))
    middle = run(parts, torch.cat((x[9:10], x[1:3])), [1, 2], other, starts=[2, 1], rows=[1, 0], saves=saves)
    state = other[3].clone()
    end = run(parts, torch.cat((x[3:7], x[10:])), [4, 2], other, starts=[3, 3], rows=[0, 1])
    again = run(parts, x[2:7], [5], other, starts=[2], rows=[3])
    assert torch.equal(begin, whole[[0, 7, 8]])
    assert torch.equal(middle, whole[[9, 1, 2]])
    assert torch.equal(end, whole[[3, 4, 5, 6, 10, 11]])
    assert torch.equal(again, whole[2:7]), "from the state that was saved after two tokens"
    used = ~states[0].isnan()
    assert torch.equal(other[:2, used], states[:2, used])
    assert state[used].isfinite().all()


def test_a_state_space_may_have_no_norm() -> None:
    parts = replace(small("state space"), norm=None)
    x = torch.randn(3, sum(parts.sizes.parts), generator=torch.Generator().manual_seed(1))
    size = OFFSET + parts.sizes.state_size
    expected = recur(parts, x.numpy(), np.zeros(size, np.float32))
    got = run(parts, x, [3], torch.zeros(1, size, device=DEVICE))
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["short convolution", "gated delta", "state space"])
def test_padding_computes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = small(kind)
    states = torch.full((2, OFFSET + parts.sizes.state_size), torch.nan, device=DEVICE)
    with monkeypatch.context() as patch:  # memory that torch has not set may contain anything
        patch.setattr(torch, "empty", lambda *size, **options: torch.full(size, torch.nan, **options))
        results = run(parts, torch.ones(2, sum(parts.sizes.parts)), [2], states, rows=[-1])
    assert states.isnan().all()
    assert torch.equal(results, torch.zeros(2, parts.sizes.out_width))


def test_the_requests_of_a_decode_step_are_found_on_the_device() -> None:
    """From the slots of its tokens: those of a request with drafts are adjacent, and padding follows."""
    states, slots = torch.zeros(9, 4), torch.tensor([5, 5, 5, 2, 7, 7, -1, -1], dtype=torch.int32)
    saves = torch.tensor([8, 6, -1, -1, 4, -1, -1, -1], dtype=torch.int32)
    found = decoding_states(states, slots, saves)
    assert found.rows.tolist() == [5, 2, 7, -1, -1, -1, -1, -1]
    assert found.firsts.tolist() == [0, 3, 4, 6, 8, 8, 8, 8, 8]
    assert found.owners.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert found.saves is saves
    plain = decoding_states(states, slots[3:5], None)
    assert [each.tolist() for each in plain[1:4]] == [[2, 7], [0, 1, 2], [0, 1]]
    assert plain.saves is None
