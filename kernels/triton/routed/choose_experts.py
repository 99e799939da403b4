"""The choice of each token's experts in Triton, one program per token. The reference is kernels/torch/experts.py."""

import torch
import triton
import triton.language as tl

from kernels.routing import Routing
from kernels.triton.arithmetic.elementary import exp2_negative, exponential
from kernels.triton.arithmetic.sums import sum_of, sums_of_rows
from kernels.triton.device import power_of_2
from kernels.triton.routed.expert_tiles import ExpertTiles, sort_pairs

#: Below all keys that are compared, and above those of experts that are already chosen.
_LEAST = tl.constexpr(-3.0e38)
_LEAST_SUM = tl.constexpr(1e-20)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores_of(values, SIGMOID: tl.constexpr):
    """Return the scores of logits [G, S]. Logits that belong to no expert are minus infinity."""
    if SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + exponential(-values))
    else:
        powers = exp2_negative((values - tl.max(tl.max(values, 1), 0)) * _LOG2_E)
        scores = tl.div_rn(powers, sum_of(sums_of_rows(powers)))
    return scores


@triton.jit
def _left_out(keys, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BEST: tl.constexpr):
    """Return 1 for each group of keys [G, S] but CHOSEN_GROUPS, whose BEST largest keys have the largest sums."""
    group = tl.arange(0, BLOCK_G)
    place = tl.arange(0, BLOCK_S)[None, :]
    best = tl.zeros((BLOCK_G,), tl.float32)
    for _ in tl.static_range(BEST):
        best += tl.max(keys, 1)
        keys = tl.where(place == tl.argmax(keys, 1)[:, None], -float("inf"), keys)
    left_out = tl.full((BLOCK_G,), 1, tl.int32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        here = group == tl.argmax(best, 0)
        left_out = tl.where(here, 0, left_out)
        best = tl.where(here, -float("inf"), best)
    return left_out


# fmt: off
@triton.jit
def choose_kernel(
    logits, correction, scales, experts, weights, order, tiles, scaling, added_to_sum,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, NUM_CHOSEN: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALISES: tl.constexpr, CORRECTS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    BEST: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, HAS_SCALES: tl.constexpr,
):
    """Write a token's experts in ascending order, and their weights; NaN if a logit is not finite.

    With a single token, each expert's tile is written at once. COLUMNS: of logits; those after EXPERTS are other
    numbers.
    """
    SIZE: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    place = tl.arange(0, BLOCK_S)[None, :]
    inside = (group[:, None] < GROUPS) & (place < SIZE)
    number = group[:, None] * SIZE + place
    read = tl.load(logits + row * COLUMNS + number, mask=inside, other=0.0)
    broken = tl.max(tl.max(tl.where(tl.abs(read) < float("inf"), 0, 1), 1), 0)
    values = tl.where(inside, tl.where(broken == 0, read, 0.0), -float("inf"))
    scores = _scores_of(values, SIGMOID)
    keys = values
    if CORRECTS:
        keys = scores + tl.load(correction + number, mask=inside, other=0.0)
    keys = tl.where(keys > _LEAST, keys, _LEAST)
    keys = tl.where(inside, keys, -float("inf"))
    if CHOSEN_GROUPS < GROUPS:
        left_out = _left_out(keys, BLOCK_G, BLOCK_S, CHOSEN_GROUPS, BEST)
        keys = tl.where(inside & (left_out[:, None] == 1), _LEAST, keys)
    N: tl.constexpr = BLOCK_G * BLOCK_S
    index = tl.arange(0, N)
    keys = tl.reshape(keys, (N,))
    scores = tl.reshape(scores, (N,))
    number = tl.reshape(number, (N,))
    taken = tl.zeros((N,), tl.int32)
    for _ in range(NUM_CHOSEN):
        here = index == tl.argmax(keys, 0)  # the first on a tie
        taken = tl.where(here, 1, taken)
        keys = tl.where(here, -float("inf"), keys)
    if NORMALISES:
        total = tl.maximum(sum_of(tl.where(taken == 1, scores, 0.0)), _LEAST_SUM)
        scores = tl.div_rn(scores, total + added_to_sum)
    scores = tl.where(broken == 0, scores * scaling, float("nan"))
    if HAS_SCALES:
        scores *= tl.load(scales + number, mask=number < EXPERTS, other=1.0)
    slot = tl.cumsum(taken, 0) - 1
    at = row * NUM_CHOSEN + slot
    tl.store(experts + at, number, mask=taken == 1)
    tl.store(weights + at, scores, mask=taken == 1)
    if tl.num_programs(0) == 1:
        tl.store(order + slot, slot, mask=taken == 1)
        tl.store(tiles + slot * 3, number, mask=taken == 1)
        tl.store(tiles + slot * 3 + 1, slot, mask=taken == 1)
        tl.store(tiles + slot * 3 + 2, slot + 1, mask=taken == 1)
# fmt: on


class ChosenExperts:
    """The routing of a layer, with its correction and scales [experts] float32 on the device."""

    def __init__(self, routing: Routing, num_experts: int, device: torch.device) -> None:
        """Send the correction and the scales to the device."""
        self.routing, self.num_experts = routing, num_experts
        own = routing.correction, routing.scales
        self._correction, self._scales = (None if one is None else torch.from_numpy(one).to(device) for one in own)

    def __call__(
        self, logits: torch.Tensor, tile_rows: int, used: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ExpertTiles]:
        """Return the weights [T, num_chosen] float32 of each token's experts, ordered by expert, and the tiles.

        A tile has at most tile_rows pairs of a token and an expert. logits [T, C] float32 contiguous, T > 0: of the
        experts, followed by other numbers. used [experts] int32: becomes 1 for experts that a token has, otherwise 0.
        """
        routing, num_experts = self.routing, self.num_experts
        assert logits.is_contiguous(), logits.stride()
        shape = len(logits), routing.num_chosen
        experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
        tiles = ExpertTiles.allocate(experts.numel(), num_experts, tile_rows, logits.device)
        by_groups = routing.num_chosen_groups < routing.num_groups
        groups = routing.num_groups if by_groups else 1
        choose_kernel[(len(logits),)](
            logits,
            logits if self._correction is None else self._correction,
            logits if self._scales is None else self._scales,
            experts,
            weights,
            tiles.order,
            tiles.bounds,
            routing.scaling,
            routing.added_to_sum,
            EXPERTS=num_experts,
            COLUMNS=logits.shape[1],
            NUM_CHOSEN=routing.num_chosen,
            SIGMOID=routing.is_sigmoid,
            NORMALISES=routing.normalises,
            CORRECTS=self._correction is not None,
            GROUPS=groups,
            CHOSEN_GROUPS=routing.num_chosen_groups if by_groups else 1,
            BEST=routing.best_of_group,
            BLOCK_G=power_of_2(groups),
            BLOCK_S=power_of_2(num_experts // groups),
            HAS_SCALES=self._scales is not None,
            num_warps=1,
        )
        if len(logits) > 1:
            sort_pairs(experts, num_experts, tile_rows, tiles)
        if used is not None:
            used.zero_()
            used.index_fill_(0, experts.flatten().long().clamp(0, num_experts - 1), 1)
        return weights, tiles
