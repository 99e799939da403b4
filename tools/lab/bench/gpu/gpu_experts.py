"""Cases of routed MLPs on a GPU: a whole one, from the router to the sum, next to one with torch's grouped product."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import grouped_mm, linear, silu

from kernels.routing import Routing
from kernels.torch.linear import Operation
from kernels.triton.linear import DeviceLinear, DeviceRouter
from tools.lab.bench.gpu.gpu_case import Case


class ExpertShape(NamedTuple):
    """The sizes of a routed MLP whose weights sum to 1, and the numbers of tokens to measure."""

    num_experts: int
    num_chosen: int
    hidden: int
    intermediate: int  # of an expert
    tokens: tuple[int, ...]


QWEN3_30B = ExpertShape(128, 8, 2048, 768, (1, 8, 64, 2048))  # Qwen3-30B-A3B's


class Expert(NamedTuple):
    """The parts of one expert."""

    gate_up: DeviceLinear
    activation: Operation
    down: DeviceLinear


class TorchMlp(NamedTuple):
    """A routed MLP made of torch's operations, of one dtype."""

    router: torch.Tensor  # [experts, hidden]
    gate_up: torch.Tensor  # [experts, 2 * intermediate, hidden]
    down: torch.Tensor  # [experts, hidden, intermediate]
    num_chosen: int

    def chosen(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the numbers of each token's experts."""
        weights, experts = linear(x, self.router).float().softmax(-1).topk(self.num_chosen)
        return weights / weights.sum(-1, keepdim=True), experts

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of x, with the tokens sorted by expert, without waiting for the host."""
        weights, experts = self.chosen(x)
        sorted_experts, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(len(self.router), device=x.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True).int()
        gate, up = grouped_mm(x[order // self.num_chosen], self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        results = grouped_mm(silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        of_pairs = torch.empty_like(results).index_copy_(0, order, results)
        return (of_pairs.view(len(x), self.num_chosen, -1) * weights[:, :, None]).sum(1).to(x.dtype)

    def looped(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of x, expert by expert; the host waits for their numbers."""
        weights, experts = self.chosen(x)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in sorted(set(experts.flatten().tolist())):
            rows, places = (experts == number).nonzero(as_tuple=True)
            gate, up = linear(x[rows], self.gate_up[number]).chunk(2, -1)
            results = linear(silu(gate) * up, self.down[number])
            out.index_add_(0, rows, results * weights[rows, places, None])
        return out.to(x.dtype)

    def best(self, x: torch.Tensor) -> tuple[str, Callable[[], torch.Tensor]]:
        """Return (name, call): torch has the grouped product on a GPU for bfloat16 only."""
        if x.dtype == torch.bfloat16:
            return "sort, grouped_mm", captured(partial(self.grouped, x))
        return "linear, index_add", partial(self.looped, x)


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a call that replays run's launches as a CUDA graph, as decoding steps do, so the host takes no time."""
    out = run()  # compiles
    if not out.is_cuda:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def expert_cases(shape: ExpertShape, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a case for each number of tokens. The bytes are those of the experts that these tokens choose."""
    from kernels.torch.gated_activation import silu_mul
    from kernels.triton.experts import TritonExperts

    num_experts, num_chosen, hidden, width, tokens = shape
    made = partial(torch.randn, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    router = made(num_experts, hidden) * hidden**-0.5
    experts = [
        Expert(
            DeviceLinear(made(2 * width, hidden) * hidden**-0.5),
            silu_mul,
            DeviceLinear(made(hidden, width) * width**-0.5),
        )
        for _ in range(num_experts)
    ]
    ours = TritonExperts(DeviceRouter(router), experts, Routing(num_chosen, normalises=True), None, function="silu")
    theirs = TorchMlp(router, ours.gate_up.weight, ours.down.weight, num_chosen)
    for count in tokens:
        x = made(count, hidden)
        num_read = len(set(theirs.chosen(x)[1].flatten().tolist()))
        numbers = num_read * 3 * hidden * width + num_experts * hidden + 2 * count * hidden
        flops = 2 * count * hidden * (num_chosen * 3 * width + num_experts)
        name, run = theirs.best(x)
        yield Case(
            "routed MLP",
            f"{count}x{num_experts}x{width}",
            captured(partial(ours, x)),
            name,
            run,
            numbers * dtype.itemsize,
            flops,
        )
