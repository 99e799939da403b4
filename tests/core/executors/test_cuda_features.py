"""Images and given embeddings on a GPU: near the C kernels, and bits that neither steps nor company change."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.features.store import Features
from core.models.grid_parts import GridParts
from core.models.llama import Llama
from core.models.operations.triton_operations import TritonOperations
from core.runner import device_features
from core.runner.cuda_model_runner import CudaModelRunner
from core.runner.model_runner import ModelRunner
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Floats, UInt8s
from ipc.wire.messages import AddRequest
from ipc.wire.placed_feature import PlacedFeature, placed_embeds
from kernels.cpu.library import load_cpu_library
from kernels.elements import FLOAT32
from tests.core.executors.test_cuda_executor import Answers, RunnerExecutor
from tests.core.models.test_llama import random_weights, tiny_config
from tests.core.runner.given_features import with_features
from tests.placed_images import SquareEncoder, placed_image
from tests.resolved import resolved_config
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE

_GRID = GridParts(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    patch_size=1,
    frames=1,
    merge_size=2,
    max_rows=6,
    norm_eps=1e-6,
    is_centred=True,
    hidden_act="gelu",
    is_gated=False,
    patch_bias=True,
    rope_theta=0.0,
    image_mean=(0.0, 0.0, 0.0),
    image_std=(1.0, 1.0, 1.0),
    rescale_factor=1.0,
)
_WINDOW: dict[str, Any] = {"sliding_window": 5, "sliding_layers": (0,)}
#: The fields of text models that see images: whose tokens have three positions, and see each other, in some layers.
SHAPES: dict[str, dict[str, Any]] = {
    "grids": {"rope_axes": (0, 1, 2, 0, 1, 2), "qk_norm": True},
    "wholes": {**_WINDOW, "scale_embeddings": True, "post_norms": True},
    "wholes in windows": {**_WINDOW, "vision": _GRID},
}
WIDTH = 72
ROWS, COLUMNS = 6, 3  # of an image
TEXT = list(range(5, 40))
#: By number: a prompt, and the first tokens of its images, with their pixels' number.
PROMPTS: list[tuple[list[int], dict[int, int]]] = [
    (TEXT[:22], {3: 1, 14: 2}),
    (TEXT[10:17], {}),
    ([*TEXT[:20], 60, 61, 62], {3: 1, 14: 2}),
    (TEXT[:22], {3: 1, 14: 3}),
]


class Encoder(SquareEncoder):
    """Its images are rows of random numbers, with others for the first layer where they form a grid."""

    image_size, num_rows = 4, ROWS

    def __init__(self, kind: str) -> None:
        self.sees_whole, self._is_grid = kind != "grids", kind == "grids"
        self.width = WIDTH * (1 + self._is_grid)

    def grid_of(self, shape: Any) -> tuple[int, int]:
        return super().grid_of(shape)[0], COLUMNS if self._is_grid else 0

    def encode(self, pixels: UInt8s) -> Floats:
        rng = np.random.default_rng(int(pixels[0, 0, 0]))
        return rng.standard_normal((ROWS, self.width), np.float32) * np.float32(0.5)


def image(number: int, place: int) -> PlacedFeature:
    return placed_image(np.full((4, 4, 3), number, np.uint8), place, ROWS)


@cache
def model(kind: str, device: str) -> Llama:
    config = tiny_config(vocab_size=64, num_hidden_layers=2, **SHAPES[kind])
    weights = list(random_weights(config, FLOAT32))
    if device == "cuda":
        return Llama(config, weights, FLOAT32, operations=TritonOperations(config, FLOAT32, DEVICE))
    return Llama(config, weights, FLOAT32, library=load_cpu_library())


class Engine:
    def __init__(
        self, kind: str, device: str = "cuda", *, budget: int = 64, num_blocks: int = 40, **options: Any
    ) -> None:
        own, sizes = model(kind, device), {"num_blocks": num_blocks, "block_size": 8, "eos_token_ids": (2,)}
        self.features = Features(WIDTH, Encoder(kind))
        given: dict[str, Any] = {"num_rows": 3, "features": self.features, **sizes}
        if isinstance(own.operations, TritonOperations):
            runner: ModelRunner = CudaModelRunner(own, own.operations, max_model_len=48, **given)
        else:
            runner = ModelRunner(own, **given)
        shape: dict[str, Any] = {"max_num_seqs": 3, "block_size": 8, "max_num_batched_tokens": budget, **options}
        shape["async_scheduling"] = device == "cuda"
        config = resolved_config(num_blocks, 48, executor="local", device=device, **shape)
        self.core = EngineCore(config, RunnerExecutor(runner))

    def run(self, which: list[int], given: list[PlacedFeature] | None = None) -> Answers:
        """Of some of the prompts, at the same time. given: features in place of the prompt's."""
        found, inbox = Answers(len(PROMPTS)), list[Any]()
        for number in which:
            ids, images = PROMPTS[number]
            placed = [image(*pair[::-1]) for pair in images.items()] if given is None else given
            for each in placed:
                self.features.put(0, each.feature)
            params = SamplingParams(temperature=0.9, seed=number, max_tokens=4, ignore_eos=True, logprobs=2)
            request = AddRequest(number, np.array(ids, "<i4").tobytes(), params, number)
            inbox.append(with_features((0, request), self.features, [each.use for each in placed]))
        found.follow(self.core, inbox)
        return found


def of(answers: Answers, number: int) -> Any:
    return answers.tokens[number], {key: one for key, one in answers.logprobs.items() if key[0] == number}


@pytest.mark.parametrize("kind", ["grids", *(pytest.param(kind, marks=pytest.mark.soak) for kind in list(SHAPES)[1:])])
def test_images_in_chunks_in_company_preempted_and_cached(kind: str) -> None:
    alone = Engine(kind, enable_prefix_caching=False)
    expected = [of(alone.run([number]), number) for number in range(4)]
    chunked = Engine(kind, budget=13)
    together = chunked.run([0, 1])
    assert [of(together, number) for number in (0, 1)] == expected[:2]
    hits = chunked.core.scheduler.stats.prefix_cache_hits
    assert of(chunked.run([2]), 2) == expected[2]  # its first blocks, which end within an image, are in the cache
    assert chunked.core.scheduler.stats.prefix_cache_hits - hits == 16
    few = Engine(kind, budget=13, num_blocks=6)
    preempted = few.run([0, 3])
    assert [of(preempted, number) for number in (0, 3)] == [expected[0], expected[3]]
    assert few.core.scheduler.stats.num_preemptions > 0
    by_cpu = Engine(kind, "cpu").run([0, 1])
    assert by_cpu.tokens[:2] == together.tokens[:2]
    for key, entries in by_cpu.logprobs.items():
        got = [value for _, value in together.logprobs[key]]
        np.testing.assert_allclose(got, [value for _, value in entries], rtol=0, atol=1e-4)
    other, mine = (expected[number][1][number, 22][0][1] for number in (3, 0))
    assert abs(other - mine) > 1e-3, "the second image makes no difference"


def test_positions_behind_an_image_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the tokens of a step behind an image, which asks the device's table, are others."""
    expected = Engine("grids").run([0]).logprobs
    monkeypatch.setattr(device_features.DeviceFeatures, "turned", lambda *_: None)
    got = Engine("grids").run([0]).logprobs
    assert got[0, 22] == expected[0, 22]  # of the prompt's step
    assert got[0, 23] != expected[0, 23]


def test_embeddings_that_are_given_have_the_bits_of_their_tokens() -> None:
    ids, engine = PROMPTS[1][0], Engine("wholes", budget=5)
    own = model("wholes", "cpu")
    (placed,) = placed_embeds(np.asarray(own.embedding(np.array(ids[2:9]))), 2)
    assert of(engine.run([1], [placed]), 1) == of(Engine("wholes").run([1]), 1)
