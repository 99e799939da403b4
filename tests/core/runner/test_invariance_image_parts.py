"""A large image is encoded in parts by steps that also have others' tokens: no bit of any request changes."""

from collections.abc import Iterator

import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.features.store import Features
from core.inputs import EngineInput
from core.models import encoder_run
from core.models.grid_encoder import GridEncoder
from core.models.grid_parts import GridParts, grid_shapes
from core.models.llama import Llama
from ipc.tables.arrays import UInt8s
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.messages import Abort
from kernels.cpu.library import load_cpu_library
from kernels.elements import FLOAT32
from tests.core.runner.given_features import with_features
from tests.core.runner.invariance import DTYPES, Recorder, difference, request, run, tiny_model
from tests.core.runner.invariance_scenarios import PROMPT, run_with_features
from tests.placed_images import placed_image

PARTS = GridParts(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    patch_size=4,
    frames=1,
    merge_size=2,
    max_rows=64,
    norm_eps=1e-6,
    is_centred=True,
    hidden_act="gelu_pytorch_tanh",
    is_gated=False,
    patch_bias=True,
    rope_theta=100.0,
    turns_by_place=False,
    image_mean=(0.5,) * 3,
    image_std=(0.5,) * 3,
    rescale_factor=1 / 255,
)
SIZES = ((40, 48), (16, 16), (56, 24))  # of images; the second one is encoded whole
PLACES = (3, 60, 130)
NAMES = ("among 32", "chunks of 37", "preempted", "from the prefix cache")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(encoder_run, "BLOCK_PATCHES", 8)
    yield
    load_cpu_library().stop_threads()


def pixels_of(number: int) -> UInt8s:
    return np.random.default_rng(number).integers(0, 256, (*SIZES[number], 3)).astype(np.uint8)


def images(model: Llama) -> tuple[Features, list[FeatureUse]]:
    rng, width = np.random.default_rng(7), model.config.hidden_size
    weights = [
        (name, (rng.standard_normal(shape, np.float32) * np.float32(0.3)).reshape(shape[:1] + (-1,) * (len(shape) > 1)))
        for name, shape in grid_shapes(PARTS, width).items()
    ]
    encoder = GridEncoder(PARTS, width, weights, FLOAT32, library=load_cpu_library())
    features, uses = Features(width, encoder), list[FeatureUse]()
    for number, place in enumerate(PLACES):
        pixels = pixels_of(number)
        placed = placed_image(pixels, place, encoder.grid_of(pixels.shape)[0])
        features.put(0, placed.feature)
        uses.append(placed.use)
    return features, uses


def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_run, "PART_WORK", 400_000)


class Watcher:
    """Notes the numbers of the requests with tokens in each step that has a part of an image."""

    def __init__(self, engine: EngineCore, seen: list[tuple[int, ...]]) -> None:
        self._engine, self._seen = engine, seen

    def begin(self, plan: SchedulerOutput) -> None:
        if plan.image_parts:
            self._seen.append(tuple(self._engine.scheduler.table.number[plan.rows].tolist()))

    def end(self, output: ModelRunnerOutput) -> None: ...


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_the_requests_own(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(DTYPES[dtype])
    features, uses = images(model)
    alone = run(model, PROMPT, features=features, uses=uses)
    in_parts(monkeypatch)
    encoder = features.encoder
    assert encoder is not None
    assert [encoder.num_parts(use.num_rows) for use in uses] == [11, 1, 7]
    for name in NAMES:
        assert difference(run_with_features(name, model, images(model)), alone) == "", name
    features, uses = images(model)
    assert difference(run(model, PROMPT, features=features, uses=uses, depth=2), alone) == ""


def test_tokens_of_a_stream_come_between_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch)
    model = tiny_model(FLOAT32)
    features, uses = images(model)
    between: list[tuple[int, ...]] = []

    def watch(engine: EngineCore) -> None:
        engine.pipeline.watchers = (Watcher(engine, between),)

    stream = request(1, PROMPT[:20], 60, 0.0)
    run(model, PROMPT[:120], features=features, uses=uses[:2], neighbours=[stream], begin=watch)
    assert len(between) == 11
    assert all(1 in numbers for numbers in between)


def test_a_request_that_ends_takes_its_image_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The aborted request's image is half done; the target, with the same one, begins it again and has its bits."""
    model = tiny_model(FLOAT32)
    features, uses = images(model)
    alone = run(model, PROMPT, features=features, uses=uses)
    in_parts(monkeypatch)
    features, uses = images(model)
    step = 0

    def abort(engine: EngineCore, recorder: Recorder) -> list[tuple[int, EngineInput]]:
        nonlocal step
        step += 1
        return [(0, Abort(np.uint32(900).tobytes()))] if step == 6 else []

    first = with_features(request(900, PROMPT, 20, 0.0), features, uses[2:])
    got = run(model, PROMPT, features=features, uses=uses, neighbours=[first], between=abort)
    assert difference(got, alone) == ""
    assert features.num_encoded == len(uses)
