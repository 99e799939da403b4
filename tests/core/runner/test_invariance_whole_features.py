"""Features whose tokens see each other have the same bits in any company, chunks, preemptions, and from the cache."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from core.features.store import Features
from core.models.llama import Llama
from ipc.tables.arrays import Floats, UInt8s
from ipc.wire.feature_messages import FeatureUse
from kernels.cpu.library import load_cpu_library
from tests.core.runner.given_features import with_features
from tests.core.runner.invariance import DTYPES, difference, request, run, tiny_model
from tests.core.runner.invariance_scenarios import PROMPT, run_with_features
from tests.placed_images import SquareEncoder, placed_image

ROWS = 24
PLACES = (3, 27, 130, 262)  # side by side, and across blocks
#: Those in which a step has room for a feature beside its other rows.
NAMES = ("among 32", "among 32 others", "chunks of 37", "preempted", "from the prefix cache")


class Encoder(SquareEncoder):
    """An encoder whose images are rows of random numbers."""

    image_size, num_rows = 4, ROWS

    def __init__(self, width: int, *, sees_whole: bool = True) -> None:
        self.width, self.sees_whole = width, sees_whole

    def encode(self, pixels: UInt8s) -> Floats:
        rng = np.random.default_rng(int(pixels[0, 0, 0]))
        return rng.standard_normal((ROWS, self.width), np.float32) * np.float32(0.3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    load_cpu_library().stop_threads()


def images(model: Llama, numbers: Sequence[int] = (1, 2, 3, 4), **encoder: Any) -> tuple[Features, list[FeatureUse]]:
    features, uses = Features(model.config.hidden_size, Encoder(model.config.hidden_size, **encoder)), []
    for number, place in zip(numbers, PLACES, strict=True):
        placed = placed_image(np.full((4, 4, 3), number, np.uint8), place, ROWS)
        features.put(0, placed.feature)
        uses.append(placed.use)
    return features, uses


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "local and global"])
def test_bits_are_the_requests_own(dtype: str, kind: str) -> None:
    model = tiny_model(DTYPES[dtype], kind)
    features, uses = images(model)
    alone = run(model, PROMPT, features=features, uses=uses)
    for name in NAMES if kind == "plain" else NAMES[2:4]:
        assert difference(run_with_features(name, model, images(model)), alone) == "", name
    features, uses = images(model, sees_whole=False)
    assert difference(run(model, PROMPT, features=features, uses=uses), alone) != ""


def test_a_hit_that_ends_within_an_image() -> None:
    """The cached prompt has the first 20 of an image's 24 tokens in whole blocks, and another text behind it."""
    model = tiny_model(DTYPES["bfloat16"])
    features, uses = images(model)
    alone = run(model, PROMPT[:60], features=features, uses=uses[:2])
    other = [*PROMPT[:51], *(token + 1 for token in PROMPT[51:60])]
    first = [with_features(request(1, other, 3, 0.0), features, uses[:2])]
    got = run(model, PROMPT[:60], first=first, features=features, uses=uses[:2], budget=30)
    assert got.num_cached_tokens == 48  # of image 27 ... 50
    assert difference(got, alone) == ""


def test_an_image_that_differs_shares_no_block_of_its_own() -> None:
    model = tiny_model(DTYPES["float32"])
    features, uses = images(model)
    changed_features, changed = images(model, (1, 2, 7, 4))
    del changed_features
    features.put(0, placed_image(np.full((4, 4, 3), 7, np.uint8), PLACES[2], ROWS).feature)
    first = [with_features(request(1, PROMPT, 3, 0.0), features, uses)]
    alone = run(model, PROMPT, features=features, uses=changed)
    got = run(model, PROMPT, first=first, features=features, uses=changed)
    assert difference(got, alone) == ""
    assert got.num_cached_tokens == 128  # whole blocks before token 130
