"""Gemma 4's encoder against transformers: pixels, rows, error, tokens; and a request's bits in any company."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from core.executors.load import load
from core.executors.local import usual_dtype
from core.features.store import Features
from core.model_files.gguf.gguf_grid import grid_row, with_grid
from core.model_files.gguf.gguf_pooled import open_gguf_pooled
from core.models.llama import Llama
from core.models.pooled_encoder import PooledEncoder
from frontend.images.gemma4 import Gemma4Images, gemma4_images
from ipc.errors import UnsupportedModelError
from ipc.files.projector import processor_settings, projector_of
from ipc.options.config import EngineConfig
from ipc.wire.feature_messages import FeatureLimits, FeatureUse
from kernels.cpu.library import load_cpu_library
from kernels.elements import FLOAT32
from tests.core.models.float_errors import check_errors
from tests.core.models.gemma4_images_checkpoint import (
    FAMILIES,
    POOL,
    ROWS,
    UNIT,
    greedy,
    inputs_of,
    processor,
    tiny_model,
    tiny_tokenizer,
    write_checkpoint,
    write_pooled_projector,
)
from tests.core.models.idefics3_checkpoint import noise
from tests.core.runner.given_features import with_features
from tests.core.runner.invariance import difference, request, run
from tests.core.runner.invariance_scenarios import SCENARIOS
from tests.placed_images import placed_image

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(40, 60, 1), noise(33, 25, 2), noise(64, 20, 3), noise(9, 120, 4)]
RULES = Gemma4Images(unit=UNIT, pool=POOL, most=ROWS, mark_id=tiny_tokenizer().token_to_id("<|image|>"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_checkpoint(family, tmp_path_factory.mktemp("gemma4")) for family in FAMILIES}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    load_cpu_library().stop_threads()


@lru_cache
def loaded(folder: Path, dtype: str = "float32") -> tuple[Llama, PooledEncoder]:
    source = load(EngineConfig(model=str(folder), dtype=dtype, max_model_len=1024, kv_window=0), usual_dtype).source  # type: ignore[arg-type]
    assert isinstance(source.model, Llama)
    assert isinstance(source.vision, PooledEncoder)
    return source.model, source.vision


def pixels_of(number: int) -> Any:
    (pixels,) = RULES.squares_of(Image.fromarray(IMAGES[number])).pixels
    return pixels


def theirs(family: str, number: int, dtype: torch.dtype) -> Any:
    """transformers' rows of an image in dtype."""
    model, inputs = tiny_model(family).model.to(dtype), inputs_of([0], [IMAGES[number]])
    try:
        with torch.no_grad():
            made = model.get_image_features(inputs["pixel_values"].to(dtype), inputs["image_position_ids"])
    finally:
        model.float()
    return torch.cat(list(made.pooler_output)).double().numpy()


def prompt_of(*numbers: int) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt with these images: its ids, and (image, position) of each."""
    ids, places = list(b"What do you see in "), list[tuple[int, int]]()
    begin, mark, end = (tiny_tokenizer().token_to_id(name) for name in ("<|image>", "<|image|>", "<image|>"))
    for number in numbers:
        places.append((number, len(ids) + 1))
        ids += [begin, *[mark] * RULES.rows_of(pixels_of(number).shape), end, 32, 99]
    return ids, places


def put(features: Features, places: list[tuple[int, int]]) -> list[FeatureUse]:
    uses = []
    for number, place in places:
        pixels = pixels_of(number)
        placed = placed_image(pixels, place, RULES.rows_of(pixels.shape))
        features.put(0, placed.feature)
        uses.append(placed.use)
    return uses


@pytest.mark.parametrize("number", range(4))
def test_pixels_are_those_of_transformers(number: int, folders: dict[str, Path]) -> None:
    _, encoder = loaded(folders["31b"])
    pixels = pixels_of(number)
    made = processor()(images=[IMAGES[number]], return_tensors="np")
    places, _ = encoder.places_of(pixels)
    order = np.lexsort((places[:, 1], places[:, 0]))  # rows of patches, as theirs
    count = len(places)
    assert made["num_soft_tokens_per_image"] == [RULES.rows_of(pixels.shape)]
    assert np.array_equal(made["image_position_ids"][0, :count], places[order][:, ::-1])
    ours = encoder.cut(pixels)[order].reshape(count, 3, -1).transpose(0, 2, 1).reshape(count, -1)
    assert np.array_equal(ours, np.float32(2) * (made["pixel_values"][0, :count] - np.float32(0.5)))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_tokens_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    model, encoder = loaded(folders[family])
    for number in range(2):
        exact = theirs(family, number, torch.float64)
        their_error = np.abs(theirs(family, number, torch.float32) - exact)
        check_errors(np.abs(encoder.encode(pixels_of(number)) - exact), their_error)
    seen: set[int] = set()
    for numbers in ((0,), (1, 2), (3, 0, 1), (0, 1, 2, 0)):
        ids, places = prompt_of(*numbers)
        features = Features(model.config.hidden_size, encoder)
        got = run(model, ids, features=features, uses=put(features, places), max_tokens=8, temperature=0.0)
        assert got.tokens[0] == greedy(family, ids, [IMAGES[number] for number in numbers], 8), numbers
        seen |= set(got.tokens[0])
    assert len(seen) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_the_requests_own(family: str, folders: dict[str, Path]) -> None:
    """In chunks, among others, preempted, from the prefix cache, and with drafts."""
    model, encoder = loaded(folders[family], "bfloat16" if family == "31b" else "float32")
    ids, places = prompt_of(0, 1)
    length, ids = len(ids), [*ids, *ids]
    places += [(number, place + length) for number, place in places]

    def shared() -> tuple[Features, list[FeatureUse]]:
        features = Features(model.config.hidden_size, encoder)
        return features, put(features, places)

    features, uses = shared()
    alone = run(model, ids, features=features, uses=uses)
    for name in ("from the prefix cache", "preempted", "chunks of 7", "chunks of 37"):
        given = dict(SCENARIOS[name].settings)
        if encoder.sees_whole and "budget" in given:
            given["budget"] += ROWS  # one step computes all of an image's tokens
        features, uses = shared()
        first = [with_features(request(901, ids, 3, 0.0), features, uses)] if "first" in given else []
        beside = [with_features(request(902, ids, 20, 0.0), features, uses), request(903, list(range(40)), 9, 0.0)]
        got = run(model, ids, features=features, uses=uses, **{**given, "first": first, "neighbours": beside})
        assert difference(got, alone) == "", name
        assert got.num_cached_tokens > 0 or not first, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_projector_gives_the_rows_of_the_folder(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model, encoder = loaded(folders[family])
    file = write_pooled_projector(tmp_path / "mmproj-tiny.gguf", family)
    text = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(text, "gemma4")
    writer.add_embedding_length(model.config.hidden_size)
    writer.add_token_list(["a", "<|image|>"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert projector_of(text, None) == file
    row = grid_row(file)
    assert row is not None
    with_window = msgspec.structs.replace(model.config, sliding_window=300)
    pooled, axes = with_grid(with_window, text, file, row)
    rows = {"max_rows": 280}  # of the published models, which files do not state
    assert (pooled, axes) == (msgspec.structs.replace(encoder.parts, **rows), None)
    if encoder.sees_whole:
        with pytest.raises(UnsupportedModelError, match="at most the text's sliding_window=80 is"):
            with_grid(model.config, text, file, row)
    weights = open_gguf_pooled(file, pooled, model.config.hidden_size, FLOAT32)
    other = PooledEncoder(pooled, model.config.hidden_size, weights, FLOAT32, library=load_cpu_library())
    assert np.array_equal(other.encode(pixels_of(0)), encoder.encode(pixels_of(0)))
    settings = json.loads(processor_settings(file))
    limits = FeatureLimits(48, 1 << 20, UNIT, 280, any_size=True)
    assert gemma4_images(settings, limits, lambda token: RULES.mark_id) == replace(RULES, most=280)
