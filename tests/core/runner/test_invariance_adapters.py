"""A request's logits are its own with an adapter too, bit for bit: in any company, chunks, preemptions, from the cache.

And a request without one has the bits that it has in an engine without adapters.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import pytest

from core.adapters.adapter import AdapterWeights, digest_of
from core.models.layers.adapted import AdaptedMatrices
from core.models.llama import Llama
from core.models.operations.cpu_operations import CpuOperations
from ipc.options.speculation import SpeculativeConfig
from ipc.wire.block_roots import PLAIN_ROOT
from ipc.wire.messages import AddRequest
from kernels.cpu.build import runnable_variants
from kernels.cpu.library import load_cpu_library
from kernels.low_rank import LowRank
from tests.core.adapters.peft_files import random_matrices
from tests.core.runner.invariance import (
    DTYPES,
    Run,
    difference,
    neighbours,
    request,
    run,
    tiny_model,
    with_adapter,
)
from tests.core.runner.invariance_scenarios import PROMPT, SCENARIOS, mixed
from tests.placed import PREFIX


class Shelf:
    """Three adapters of a model, by digest: all matrices, some, and other ranks."""

    def __init__(self, model: Llama) -> None:
        assert isinstance(model.operations, CpuOperations)
        host = AdaptedMatrices(model.config, model.operations)
        made = [
            random_matrices(host.shapes, 8, 1),
            random_matrices(host.shapes, 16, 2, targets=("q_proj", "v_proj", "down_proj")),
            random_matrices(host.shapes, 5, 3, ranks={"up_proj": 21, "o_proj": 1}),
        ]
        self._packed: dict[str, Any] = {}
        for matrices in made:
            low_rank = {name: LowRank(a, b, 0.75) for name, (a, b) in matrices.items()}
            digest = digest_of(low_rank)
            self._packed[digest] = host.pack(AdapterWeights(low_rank, digest))
        self.digests = list(self._packed)

    def find(self, digest: str) -> Any:
        return self._packed[digest]


@lru_cache(maxsize=16)
def shelf(dtype: str, kind: str = "plain", variant: str | None = None) -> tuple[Llama, Shelf]:
    model = tiny_model(DTYPES[dtype], kind, variant)
    return model, Shelf(model)


#: Kinds of models whose adapters only soaks check.
SOAKED = ("beside attention", "short convolution", "state space", "gates of heads")


def in_turn(sent: Sequence[tuple[int, AddRequest]], digests: Sequence[str]) -> list[tuple[int, AddRequest]]:
    """The requests with each adapter in turn, and none."""
    return [with_adapter(one, ["", *digests][number % (len(digests) + 1)]) for number, one in enumerate(sent)]


def adapted(name: str, model: Llama, adapters: Shelf, adapter: str, **target: Any) -> Run:
    """The target with this adapter in a scenario whose neighbours have all of them."""
    group, given = SCENARIOS[name]
    settings = dict(given)
    settings["neighbours"] = in_turn(settings.get("neighbours", ()), adapters.digests)
    before = [numbered(one, 50 * number) for one in settings.get("first", ()) for number in range(4)]
    settings["first"] = in_turn(before, adapters.digests)  # all of them, and none, have computed the prompt
    got = run(model, PROMPT, adapters=adapters, adapter=adapter, max_loras=2, **settings, **target)
    if group == "preempted":
        assert got.num_preemptions > 0, "the target was not preempted: the pool is too large"
    if group == "cached":
        assert got.num_cached_tokens > 200, f"only {got.num_cached_tokens} tokens came from the prefix cache"
    return got


def numbered(sent: tuple[int, AddRequest], more: int) -> tuple[int, AddRequest]:
    client, message = sent
    return client, msgspec.structs.replace(message, number=message.number + more, seed=message.seed + more)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    load_cpu_library().stop_threads()


def check(model: Llama, adapters: Shelf, names: Iterable[str], num_adapters: int) -> None:
    """The first adapter in these scenarios, others and a request without one in the largest company."""
    base = run(model, PROMPT)
    seen = [base.logits[0].tobytes()]
    for number, digest in enumerate(adapters.digests[:num_adapters]):
        alone = run(model, PROMPT, adapters=adapters, adapter=digest, max_loras=2)
        seen.append(alone.logits[0].tobytes())
        for name in names if number == 0 else ("among 32",):
            assert difference(adapted(name, model, adapters, digest), alone) == "", name
    assert len(set(seen)) == num_adapters + 1
    assert difference(adapted("among 32", model, adapters, ""), base) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_requests_own_in_any_company(dtype: str) -> None:
    check(*shelf(dtype), ("among 32", "chunks of 37", "preempted", "from the prefix cache"), 2)


@pytest.mark.soak
@pytest.mark.parametrize("variant", runnable_variants())
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_all_scenarios_of_all_variants(dtype: str, variant: str) -> None:
    check(*shelf(dtype, "plain", variant), SCENARIOS, 3)


@pytest.mark.parametrize("variant", runnable_variants()[1:])
def test_in_every_variant(variant: str) -> None:
    model, adapters = shelf("float32", "plain", variant)
    alone = run(model, PROMPT[:60], adapters=adapters, adapter=adapters.digests[1], max_tokens=5, max_loras=2)
    crowd = in_turn(neighbours(8, 5, 50, 9), adapters.digests)
    settings: dict[str, Any] = {"adapters": adapters, "adapter": adapters.digests[1], "max_tokens": 5, "max_loras": 3}
    assert difference(run(model, PROMPT[:60], neighbours=crowd, **settings), alone) == ""


@pytest.mark.parametrize(
    "kind",
    [
        *("local and global", "experts", "gated delta"),
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in SOAKED),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_norms_gates_and_windows_of_another_kind(dtype: str, kind: str) -> None:
    model, adapters = shelf(dtype, kind)
    alone = run(model, PROMPT, adapters=adapters, adapter=adapters.digests[0], max_loras=2)
    for name in ("chunks of 37", "preempted"):
        assert difference(adapted(name, model, adapters, adapters.digests[0]), alone) == "", name


def test_two_threads_give_the_bits_of_one() -> None:
    model, adapters = shelf("bfloat16")
    alone = run(model, PROMPT, adapters=adapters, adapter=adapters.digests[2], max_loras=2)
    load_cpu_library().start_threads(2)
    assert difference(adapted("among 32", model, adapters, adapters.digests[2]), alone) == ""


def test_with_drafts_choices_and_logprobs() -> None:
    model, adapters = shelf("float32")
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3, step_ns=(1,) * 8)
    for params in ({"logprobs": 2, "prompt_logprobs": 1}, {"n": 2}):
        alone = run(model, PROMPT, adapters=adapters, adapter=adapters.digests[1], params=params, max_loras=2)
        crowd = in_turn(mixed(neighbours(9, 5, 50, 20)), adapters.digests)
        settings: dict[str, Any] = {"neighbours": crowd, "params": params, "max_loras": 3}
        for more in ({"budget": 90}, {"speculative": ngram}):
            got = run(model, PROMPT, adapters=adapters, adapter=adapters.digests[1], **settings, **more)
            assert difference(got, alone) == "", (params, more)


@pytest.mark.parametrize("is_planted", [False, True])
def test_the_state_of_another_adapter_is_noticed(monkeypatch: pytest.MonkeyPatch, *, is_planted: bool) -> None:
    """If the prefix cache did not tell adapters apart, a prompt would start from a state that another one left."""
    model, adapters = shelf("bfloat16", "gated delta")
    if is_planted:
        monkeypatch.setattr(f"{PREFIX}core.batch.request.root_of_message", lambda message: PLAIN_ROOT)
    own, other, _ = adapters.digests
    settings: dict[str, Any] = {"adapters": adapters, "adapter": own, "max_loras": 2, "max_tokens": 4}
    alone = run(model, PROMPT, prefix_caching=False, **settings)
    got = run(model, PROMPT, first=[with_adapter(request(1, PROMPT, 3, 0.0), other)], **settings)
    assert (got.num_cached_tokens > 0) == is_planted
    assert (difference(got, alone) != "") == is_planted
