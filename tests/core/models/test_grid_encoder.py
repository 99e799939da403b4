"""The encoders of Qwen's models against transformers: rows, error, tokens; and a request's bits in any company."""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.executors.load import load
from core.executors.local import LocalExecutor, usual_dtype
from core.features.store import Features
from core.model_files.gguf.gguf_grid import grid_row, open_gguf_grid, with_grid
from core.model_files.model_config import read_model_config
from core.models.grid_encoder import GridEncoder, _windows
from core.models.grid_parts import GridParts
from core.models.llama import Llama
from core.runner.feature_rows import FeatureRows
from core.runner.step_inputs import StepInputs
from frontend.images.any_size import AnySizeImages, any_size_images
from ipc.errors import EngineCoreError, InvalidRequestError, ModelFileError, UnsupportedModelError
from ipc.files.projector import processor_settings, projector_of
from ipc.options.config import EngineConfig
from ipc.wire.feature_messages import FeatureLimits, FeatureUse
from kernels.cpu.library import load_cpu_library
from kernels.elements import FLOAT32
from tests.core.models.float_errors import check_errors
from tests.core.models.grid_checkpoints import (
    FAMILIES,
    SIZE,
    UNIT,
    greedy,
    inputs_of,
    processor,
    tiny_model,
    tiny_tokenizer,
    write_checkpoint,
    write_grid_projector,
)
from tests.core.models.idefics3_checkpoint import noise
from tests.core.models.test_vision_encoder import set_setting
from tests.core.runner.given_features import with_features
from tests.core.runner.invariance import difference, request, run
from tests.core.runner.invariance_scenarios import SCENARIOS
from tests.placed_images import placed_image

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(40, 60, 1), noise(33, 25, 2), noise(64, 20, 3), noise(9, 50, 4)]
RULES = AnySizeImages(
    unit=UNIT,
    least=SIZE["shortest_edge"],
    most=SIZE["longest_edge"],
    mark_id=tiny_tokenizer().token_to_id("<|image_pad|>"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_checkpoint(family, tmp_path_factory.mktemp("grid")) for family in FAMILIES}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    load_cpu_library().stop_threads()


@lru_cache
def loaded(folder: Path, dtype: str = "float32") -> tuple[Llama, GridEncoder]:
    source = load(EngineConfig(model=str(folder), dtype=dtype, max_model_len=512), usual_dtype).source  # type: ignore[arg-type]
    assert isinstance(source.model, Llama)
    assert isinstance(source.vision, GridEncoder)
    return source.model, source.vision


def theirs(family: str, number: int, dtype: torch.dtype) -> Any:
    """transformers' rows of an image in dtype, with those that are added after the first layers."""
    visual, inputs = tiny_model(family).model.visual.to(dtype), inputs_of([0], [IMAGES[number]])
    try:
        with torch.no_grad():
            made = visual(inputs["pixel_values"].to(dtype), grid_thw=inputs["image_grid_thw"])
    finally:
        visual.float()
    deep = getattr(made, "deepstack_features", None) or []
    return torch.cat([made.pooler_output, *deep], 1).double().numpy()


def ours(encoder: GridEncoder, number: int) -> Any:
    return encoder.encode(RULES.squares_of(Image.fromarray(IMAGES[number])).pixels[0])


def prompt_of(*numbers: int) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt with these images: its ids, and (image, position) of each."""
    ids, places = list(b"What do you see in "), list[tuple[int, int]]()
    for number in numbers:
        (pixels,) = RULES.squares_of(Image.fromarray(IMAGES[number])).pixels
        begin, mark, end = (
            tiny_tokenizer().token_to_id(f"<|{name}|>") for name in ("vision_start", "image_pad", "vision_end")
        )
        places.append((number, len(ids) + 1))
        ids += [begin, *[mark] * RULES.rows_of(pixels.shape), end, 32, 99]
    return ids, places


def put(features: Features, places: list[tuple[int, int]]) -> list[FeatureUse]:
    uses = []
    for number, place in places:
        (pixels,) = RULES.squares_of(Image.fromarray(IMAGES[number])).pixels
        placed = placed_image(pixels, place, RULES.rows_of(pixels.shape))
        features.put(0, placed.feature)
        uses.append(placed.use)
    return uses


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_tokens_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    model, encoder = loaded(folders[family])
    for number in range(2):
        exact = theirs(family, number, torch.float64)
        their_error = np.abs(theirs(family, number, torch.float32) - exact)
        check_errors(np.abs(ours(encoder, number) - exact), their_error)
    for numbers in ((0,), (1, 2), (3, 0, 1), (0, 1, 2, 0)):
        ids, places = prompt_of(*numbers)
        features = Features(model.config.hidden_size, encoder)
        got = run(model, ids, features=features, uses=put(features, places), max_tokens=8, temperature=0.0)
        expected = greedy(family, ids, [IMAGES[number] for number in numbers], 8)
        assert got.tokens[0] == expected, numbers


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "qwen3.5"])
def test_bits_are_the_requests_own(family: str, folders: dict[str, Path]) -> None:
    """In chunks that end within images, among others, preempted, from the prefix cache, and with drafts."""
    model, encoder = loaded(folders[family], "bfloat16" if family == "qwen3-vl" else "float32")
    ids, places = prompt_of(0, 1, 2)
    ids = [*ids, *ids, *ids]
    length = len(ids) // 3
    places += [(number, place + length * turn) for turn in (1, 2) for number, place in places]

    def shared() -> tuple[Features, list[FeatureUse]]:
        features = Features(model.config.hidden_size, encoder)
        return features, put(features, places)

    features, uses = shared()
    alone = run(model, ids, features=features, uses=uses)
    for name in ("chunks of 7", "chunks of 37", "from the prefix cache", "preempted"):
        given = dict(SCENARIOS[name].settings)
        features, uses = shared()
        first = [with_features(request(901, ids, 3, 0.0), features, uses)] if "first" in given else []
        beside = [with_features(request(902, ids, 20, 0.0), features, uses), request(903, list(range(40)), 9, 0.0)]
        got = run(model, ids, features=features, uses=uses, **{**given, "first": first, "neighbours": beside})
        assert difference(got, alone) == "", name
        assert got.num_cached_tokens > 0 or not first, name


def test_positions_go_on_behind_an_image() -> None:
    """Without that the greedy tokens of many prompts are the same."""
    family = "qwen3-vl"
    ids, places = prompt_of(0)
    model = tiny_model(family).model
    inputs = inputs_of(ids, [IMAGES[0]])
    expected, _ = model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"])
    assert int(expected.max()) < len(ids) - 10
    features = Features(8)
    rows = FeatureRows(features)
    (height, width) = RULES.size_of(*IMAGES[0].shape[:2])
    count = height * width // UNIT**2
    rows.add(4, [FeatureUse(places[0][1], count, b"", num_columns=width // UNIT)])
    for begin, end in ((0, len(ids)), (5, 30), (places[0][1] + 3, places[0][1] + 9), (len(ids) - 1, len(ids))):
        empty = np.zeros(0, np.int64)
        inputs = StepInputs(
            rows=np.array([2, 4]),
            token_ids=empty,
            positions=np.array([7, *range(begin, end)]),
            slots=empty,
            num_tokens=np.array([1, end - begin]),
            context_lens=empty,
            block_tables=empty.astype(np.int32)[None],
            samples=empty.astype(bool),
            num_samples=0,
            logits_rows=empty,
        )
        got = rows.positions_of(inputs)
        assert got is not None
        three = got if got.ndim == 2 else np.repeat(got[:, None], 3, 1)
        assert three[0].tolist() == [7, 7, 7]
        assert np.array_equal(three[1:], expected[:, 0, begin:end].T.numpy())
    rows.remove(4)
    assert not rows.grids


@pytest.mark.parametrize("size", [(40, 60), (33, 25), (9, 200), (5, 2), (5, 7), (300, 301), (64, 64), (8, 16)])
def test_pixels_are_those_of_transformers(size: tuple[int, int], folders: dict[str, Path]) -> None:
    _, encoder = loaded(folders["qwen2.5-vl"])
    image = noise(*size, 6)
    made = processor()(images=[image], return_tensors="np")
    (pixels,) = RULES.squares_of(Image.fromarray(image)).pixels
    assert [1, pixels.shape[0] // 4, pixels.shape[1] // 4] == made["image_grid_thw"][0].tolist()
    assert np.array_equal(encoder.cut(pixels), made["pixel_values"])


def test_windows_hold_all_rows_once() -> None:
    order, lengths = _windows(5, 7, 3)
    assert sorted(order.tolist()) == list(range(35))
    assert lengths.tolist() == [9, 9, 3, 6, 6, 2]
    assert order[:4].tolist() == [0, 1, 2, 7]


def test_wrong_images(folders: dict[str, Path]) -> None:
    _, encoder = loaded(folders["qwen2-vl"])
    assert encoder.grid_of([16, 24, 3]) == (6, 3)
    for shape, text in (([16, 20, 3], "multiples of 8"), ([16, 24], "multiples of 8"), ([800, 80, 3], "at most 60")):
        with pytest.raises(InvalidRequestError, match=text):
            encoder.grid_of(shape)
    with pytest.raises(InvalidRequestError, match="one side may be at most 200 times"):
        RULES.size_of(1, 300)


def test_a_text_model_that_kept_the_whole_config_runs_alone(tmp_path: Path) -> None:
    write_checkpoint("qwen3-vl", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if ".visual." not in name}, file)
    assert load(EngineConfig(model=str(tmp_path), dtype="float32"), usual_dtype).source.vision is None


def test_images_are_no_larger_than_the_option_says(folders: dict[str, Path]) -> None:
    config = EngineConfig(model=str(folders["qwen3-vl"]), dtype="float32", image_max_pixels=10 * UNIT**2 + 5)
    executor = LocalExecutor(config)
    assert executor.info.image_tokens == 10
    assert executor.features is not None
    limits = executor.features.limits
    assert limits is not None
    rules = any_size_images({"patch_size": 4, "size": SIZE}, limits, lambda token: 5)
    height, width = rules.size_of(300, 200)
    assert 0 < height * width <= 10 * UNIT**2


WRONG: list[tuple[list[str], Any, type[EngineCoreError], str]] = [
    (["vision_config", "hidden_act"], "relu", UnsupportedModelError, "vision_config.hidden_act='relu'"),
    (["vision_config", "in_channels"], 4, UnsupportedModelError, "vision_config.in_channels=4"),
    (["vision_config", "num_heads"], 3, ModelFileError, "must be a multiple of 4 \\* num_heads=12, got 32"),
    (["vision_config", "out_hidden_size"], 7, ModelFileError, "must be the text model's hidden_size=48, got 7"),
    (["vision_config", "deepstack_visual_indexes"], [3], ModelFileError, "indices of the 3 layers, ascending"),
    (["vision_config", "num_position_embeddings"], 24, ModelFileError, "must be a square number, got 24"),
    (
        ["vision_config"],
        {"patch_size": 1000, "spatial_merge_size": 64, "out_hidden_size": 48},
        ModelFileError,
        "is too large",
    ),
    (["text_config", "rope_parameters", "mrope_section"], [4, 4, 4], ModelFileError, "with the sum 8, got"),
]


@pytest.mark.parametrize(("keys", "value", "error", "text"), WRONG)
def test_wrong_settings(tmp_path: Path, keys: list[str], value: Any, error: type[EngineCoreError], text: str) -> None:
    tiny_model("qwen3-vl").config.save_pretrained(tmp_path)
    set_setting(tmp_path, ["architectures"], ["Qwen3VLForConditionalGeneration"])
    set_setting(tmp_path, keys, value)
    with pytest.raises(error, match=text):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "kind", "architecture"),
    [
        ("qwen2-vl", "qwen2vl_merger", "qwen2vl"),
        ("qwen2.5-vl", "qwen2.5vl_merger", "qwen2vl"),
        ("qwen3-vl", "qwen3vl_merger", "qwen3vl"),
    ],
)
def test_a_projector_gives_the_rows_of_the_folder(
    family: str, kind: str, architecture: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    _, encoder = loaded(folders[family])
    file = write_grid_projector(tmp_path / "mmproj-tiny.gguf", family, kind)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", architecture)
    writer.add_array(
        f"{architecture}.rope.dimension_sections", [*FAMILIES[family][1]["rope_parameters"]["mrope_section"], 0]
    )
    writer.add_embedding_length(tiny_model(family).config.text_config.hidden_size)
    writer.add_token_list(["a", "<|image_pad|>"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = tmp_path / "tiny.gguf"
    assert projector_of(text, None) == file
    row, config = grid_row(file), read_model_config(folders[family])
    assert row is not None
    parts, axes = with_grid(config, text, file, row)
    assert isinstance(config.vision, GridParts)
    colours = {"image_mean": parts.image_mean, "image_std": parts.image_std}  # float32 in the file
    assert (parts, axes) == (msgspec.structs.replace(config.vision, **colours), config.rope_axes)
    weights = open_gguf_grid(file, parts, config.hidden_size, FLOAT32)
    other = GridEncoder(parts, config.hidden_size, weights, FLOAT32, library=load_cpu_library())
    assert np.array_equal(ours(other, 0), ours(encoder, 0))
    settings = json.loads(processor_settings(file))
    limits = FeatureLimits(48, 1 << 20, encoder.image_size, encoder.num_rows, any_size=True)
    assert any_size_images(settings, limits, lambda token: RULES.mark_id) == RULES
