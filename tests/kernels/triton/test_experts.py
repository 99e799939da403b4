"""Triton's routed MLPs equal their torch reference: choices, tiles, products and sums; experts without tokens."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from kernels.routing import Routing
from kernels.torch.experts import TorchExperts, choose_experts
from kernels.torch.gated_activation import clamped_silu_mul, gelu_tanh_mul, silu_mul
from kernels.torch.linear import Operation, TorchLinear
from kernels.triton.linear import DeviceLinear
from kernels.triton.routed import experts as experts_module
from kernels.triton.routed.choose_experts import ChosenExperts
from kernels.triton.routed.expert_products import (
    FEW,
    FEW_FLOATS,
    MANY,
    MANY_FLOATS,
    MANY_IN_LITTLE,
    SOME,
    TileShape,
    tile_shape,
)
from kernels.triton.routed.expert_tiles import ExpertTiles, sort_pairs
from kernels.triton.routed.experts import TritonExperts
from tests.triton_device import ANYWHERE, DEVICE, GPU_ONLY

pytestmark = ANYWHERE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FUNCTIONS: dict[str, Operation] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
    "clamped_silu": clamped_silu_mul,
}
#: Of a result: its numbers are rounded before down, after it, and at the end.
NEAR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correction(count: int) -> Any:
    return random(count, seed=9).numpy() * np.float32(0.3)


ROUTINGS: dict[str, tuple[int, Routing]] = {
    "mixtral": (8, Routing(2, normalises=True)),
    "olmoe": (12, Routing(5, normalises=False)),
    "deepseek-v2": (20, Routing(3, False, num_groups=4, num_chosen_groups=2, scaling=16.0)),
    "deepseek-v3": (
        32,
        Routing(6, True, True, 8, 3, best_of_group=2, scaling=2.5, correction=correction(32), added_to_sum=1e-20),
    ),
    "ernie": (9, Routing(3, True, correction=correction(9))),
    "minimax": (7, Routing(7, True, is_sigmoid=True, added_to_sum=0.5)),
    "gemma4": (6, Routing(2, normalises=True, scales=correction(6) + np.float32(1))),
    "llama4": (5, Routing(2, normalises=False, is_sigmoid=True, scales_inputs=True)),
    "one": (1, Routing(1, normalises=False)),
}


def sorted_choice(routing: Routing, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's, in the order of the experts' numbers."""
    chosen, weights = choose_experts(routing, logits)
    chosen, order = chosen.sort(-1)
    return chosen, weights.gather(1, order)


def pairs_of(tiles: ExpertTiles) -> list[tuple[int, int]]:
    """The expert and the number of each pair, tile by tile; every place must be in one tile."""
    order, bounds = tiles.order.tolist(), [bound for bound in tiles.bounds.tolist() if bound[1] < bound[2]]
    assert [bound[1] for bound in bounds] == [0, *(bound[2] for bound in bounds[:-1])]
    return [(expert, pair) for expert, first, end in bounds for pair in order[first:end]]


@pytest.mark.parametrize("further", [0, 1])
@pytest.mark.parametrize("name", ROUTINGS)
def test_choices(name: str, further: int) -> None:
    num_experts, routing = ROUTINGS[name]
    logits = random(6, num_experts + further) * 2
    logits[0], logits[1] = 1.0, 60.0 * logits[1]  # equal ones; extremes
    expected, expected_weights = sorted_choice(routing, logits[:, :num_experts])
    choose = ChosenExperts(routing, num_experts, DEVICE)
    for rows in (slice(0, 6), slice(2, 3), slice(0, 2)):
        weights, tiles = choose(logits[rows].to(DEVICE), 16)
        torch.testing.assert_close(weights.cpu(), expected_weights[rows], rtol=2e-6, atol=1e-30)
        chosen = expected[rows].flatten().tolist()
        assert pairs_of(tiles) == sorted((expert, pair) for pair, expert in enumerate(chosen))


def test_a_token_whose_logits_are_no_numbers_has_weights_that_are_none() -> None:
    logits = random(4, 5)
    logits[1, 2], logits[2, 4], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    for routing in (Routing(2, normalises=True), Routing(2, True, True, correction=correction(5))):
        weights, tiles = ChosenExperts(routing, 5, DEVICE)(logits.to(DEVICE), 16)
        assert weights.isnan().all(1).tolist() == [False, True, True, True]
        assert sorted(pair for _, pair in pairs_of(tiles)) == list(range(8))


@pytest.mark.parametrize("num_experts", [1, 5, 40])
@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("num_pairs", [2, 33, pytest.param(700, marks=pytest.mark.soak), 2100])
def test_every_pair_is_in_one_tile_of_its_expert(num_experts: int, tile_rows: int, num_pairs: int) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    anywhere = torch.randint(num_experts, (num_pairs,), generator=generator, dtype=torch.int32)
    for experts in (anywhere, torch.zeros_like(anywhere), torch.full_like(anywhere, num_experts - 1)):
        tiles = ExpertTiles.allocate(num_pairs, num_experts, tile_rows, DEVICE)
        tiles.bounds.fill_(-7)
        sort_pairs(experts.to(DEVICE), num_experts, tile_rows, tiles)
        assert len(tiles.bounds) <= min(num_pairs, num_pairs // tile_rows + num_experts)
        bounds = tiles.bounds.tolist()
        assert all(0 <= expert < num_experts and 0 <= end - first <= tile_rows for expert, first, end in bounds)
        assert all(before[2] <= after[1] for before, after in pairwise(bounds))
        assert pairs_of(tiles) == sorted((expert, pair) for pair, expert in enumerate(experts.tolist()))


class Expert(NamedTuple):
    gate_up: Any
    activation: Operation
    down: Any


class Both:
    """One routed MLP by torch in float32 and by Triton, of the same numbers."""

    def __init__(
        self,
        routing: Routing,
        num_experts: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        function: str = "silu",
        *,
        biases: bool = False,
        shared: int = 0,
    ) -> None:
        seeds = iter(range(1000))

        def parts(rows: int, depth: int, *, is_biased: bool = biases) -> tuple[torch.Tensor, torch.Tensor | None]:
            weight = (random(rows, depth, seed=next(seeds)) * depth**-0.5).to(dtype)
            return weight, random(rows, seed=next(seeds)).to(dtype) if is_biased else None

        columns = num_experts + routing.has_shared_gate
        router = parts(columns, hidden)
        sizes = [*[width] * num_experts, *[shared] * bool(shared)]
        matrices = [(parts(2 * size, hidden), parts(hidden, size)) for size in sizes]

        def theirs(one: tuple[torch.Tensor, torch.Tensor | None]) -> TorchLinear:
            return TorchLinear(one[0].float(), None if one[1] is None else one[1].float())

        def ours(one: tuple[torch.Tensor, torch.Tensor | None]) -> DeviceLinear:
            return DeviceLinear(one[0].to(DEVICE), None if one[1] is None else one[1].to(DEVICE))

        activation = FUNCTIONS[function]
        reference = [Expert(theirs(first), activation, theirs(last)) for first, last in matrices]
        own = [Expert(ours(first), activation, ours(last)) for first, last in matrices]
        self.torch = TorchExperts(
            theirs(router), tuple(reference[:num_experts]), routing, reference[-1] if shared else None
        )
        bias = None if router[1] is None else router[1].float().to(DEVICE)
        device_router = DeviceLinear(router[0].to(DEVICE), bias, torch.float32)
        self.triton = TritonExperts(
            device_router, own[:num_experts], routing, own[-1] if shared else None, function=function
        )
        self.dtype, self.own = dtype, own

    def check(self, x: torch.Tensor) -> None:
        got = self.triton(x.to(DEVICE))
        assert got.dtype == self.dtype
        expected = self.torch(x.float())
        error = (got.cpu().float() - expected).abs().max() / expected.abs().max()
        assert error < NEAR[self.dtype], error


#: Name -> routing, experts, hidden size, width and further arguments of Both.
MLPS: dict[str, tuple[Routing, int, int, int, dict[str, Any]]] = {
    "plain": (Routing(2, normalises=True), 5, 32, 48, {}),
    "odd sizes": (Routing(3, normalises=False), 7, 37, 41, {"function": "gelu_pytorch_tanh"}),
    "biases": (Routing(2, normalises=True), 4, 40, 20, {"biases": True, "function": "clamped_silu"}),
    "shared": (Routing(2, normalises=True, scaling=1.7), 5, 32, 20, {"shared": 28}),
    "shared with a gate": (Routing(2, normalises=True, has_shared_gate=True), 5, 32, 20, {"shared": 12}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MLPS)
def test_a_routed_mlp(name: str, dtype: torch.dtype) -> None:
    routing, num_experts, hidden, width, options = MLPS[name]
    both = Both(routing, num_experts, hidden, width, dtype, **options)
    x = random(19, hidden, seed=3).to(dtype)
    for rows in (x, x[:1], x[:2], x[:1].expand(5, -1).contiguous()):  # the last: some experts have all tokens
        both.check(rows)
    assert both.triton(x[:0].to(DEVICE)).shape == (0, hidden)


@pytest.mark.parametrize("shape", [FEW, SOME, MANY, MANY_IN_LITTLE, FEW_FLOATS, MANY_FLOATS])
def test_every_shape_of_tiles(shape: TileShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "tile_shape", lambda *_, **__: shape)
    dtype = torch.float32 if shape in (FEW_FLOATS, MANY_FLOATS) else torch.bfloat16
    both = Both(Routing(2, normalises=True), 3, 96, 72, dtype)
    both.check(random(150, 96, seed=3).to(dtype))


def test_few_tokens_have_small_tiles() -> None:
    half = [tile_shape(pairs, 128, torch.bfloat16, has_room=True) for pairs in (8, 512, 2048, 16_384)]
    assert half == [FEW, FEW, SOME, MANY]
    assert tile_shape(16_384, 128, torch.bfloat16, has_room=False) == MANY_IN_LITTLE
    assert [tile_shape(pairs, 128, torch.float32, has_room=True) for pairs in (8, 2048)] == [FEW_FLOATS, MANY_FLOATS]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_do_not_depend_on_others(dtype: torch.dtype) -> None:
    """Of one shape of tiles, and given its logits, whose bits are those of torch's product."""
    both = Both(Routing(2, normalises=True), 5, 48, 40, dtype)
    x = random(20, 48, seed=3).to(DEVICE, dtype)
    logits = both.triton._router(x)
    both.triton._router = lambda rows: logits[: len(rows)].clone()  # type: ignore[assignment]
    whole = both.triton(x)
    for count in (1, 2, 7):
        assert torch.equal(both.triton(x[:count]), whole[:count])
    again = x.clone()
    again[1:] = random(19, 48, seed=4)
    assert torch.equal(both.triton(again)[0], whole[0])
    assert torch.equal(both.triton(x), whole)


def test_a_token_that_is_no_number_stays_alone() -> None:
    both = Both(Routing(2, normalises=True), 3, 32, 20, torch.float32)
    x = random(6, 32, seed=3).to(DEVICE)
    expected = both.triton(x)
    x[2] = torch.nan
    got = both.triton(x)
    assert got[2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    torch.testing.assert_close(got[rest], expected[rest])


def test_experts_weights_are_in_memory_once() -> None:
    both = Both(Routing(2, normalises=True), 4, 32, 20, torch.float32, biases=True)
    for product, stack in (("gate_up", both.triton.gate_up), ("down", both.triton.down)):
        pointers = [getattr(expert, product).weight.data_ptr() for expert in both.own]
        assert pointers == [own.data_ptr() for own in stack.weight]
        assert stack.weight.is_contiguous()


def test_a_router_does_not_round_to_the_models_dtype() -> None:
    x, weight = random(3, 64).to(DEVICE, torch.bfloat16), random(5, 64, seed=1).to(DEVICE, torch.bfloat16)
    bias = random(5, seed=2).to(DEVICE)
    expected = linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(DeviceLinear(weight, bias, torch.float32)(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=GPU_ONLY) for dtype in DTYPES])
def test_sizes_of_real_models(dtype: torch.dtype) -> None:
    both = Both(Routing(4, normalises=True), 32, 1024, 768, dtype)
    for count in (1, 40, 300, 2048):  # few, some and many pairs of each expert
        both.check(random(count, 1024, seed=3).to(dtype))


@pytest.mark.parametrize("count", [pytest.param(count, marks=GPU_ONLY) for count in (1, 4)])
def test_a_cuda_graph_captures_a_routed_mlp(count: int) -> None:
    both = Both(Routing(2, normalises=True, has_shared_gate=True), 5, 64, 48, torch.bfloat16, shared=32)
    x = random(count, 64, seed=1).to(DEVICE, torch.bfloat16)
    both.triton(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both.triton(x)
    for seed in (2, 3):
        x.copy_(random(count, 64, seed=seed))
        graph.replay()
        assert torch.equal(out, both.triton(x))
