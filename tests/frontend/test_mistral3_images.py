"""Mistral 3 with images, on Pixtral's encoder: pixels, rows and tokens are transformers'; chats, chunks, the cache."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from core.executors.load import load
from core.executors.local import usual_dtype
from core.model_files.gguf.gguf_grid import grid_row, with_grid
from core.model_files.gguf.gguf_pixtral import open_gguf_pixtral
from core.model_files.model_config import read_model_config
from core.models.grid_encoder import GridEncoder
from frontend.images.pixtral import PixtralImages, pixtral_images
from frontend.llm import LLM
from ipc.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ipc.files.projector import processor_settings, projector_of
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.feature_messages import FeatureLimits
from kernels.cpu.library import load_cpu_library
from kernels.elements import FLOAT32
from tests.core.models.float_errors import check_errors
from tests.core.models.idefics3_checkpoint import noise
from tests.core.models.mistral3_checkpoint import (
    FAMILIES,
    LONGEST,
    PLAIN,
    UNIT,
    greedy,
    processor,
    tiny_model,
    tiny_tokenizer,
    write_checkpoint,
    write_pixtral_projector,
)
from tests.core.models.test_vision_encoder import set_setting

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(100, 150, 1), noise(48, 40, 2), noise(200, 60, 3), noise(7, 47, 4)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 700, "max_num_batched_tokens": 50}
SIZES = [(48, 48), (100, 150), (7, 300), (1, 1), (333, 50), (70, 71), (64, 8)]
RULES = PixtralImages(unit=UNIT, longest=LONGEST, mark_id=tiny_tokenizer().token_to_id("[IMG]"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_checkpoint(family, tmp_path_factory.mktemp("mistral3")) for family in FAMILIES}


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(folders["mistral-small"]), **OPTIONS) as llm:
        yield llm


def asked(*images: Any, text: str = "What is [IMG] this?") -> Any:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def encoder_of(folder: Path) -> GridEncoder:
    vision = load(EngineConfig(model=str(folder), dtype="float32", max_model_len=512), usual_dtype).source.vision
    assert isinstance(vision, GridEncoder)
    return vision


def theirs(family: str, number: int, dtype: torch.dtype) -> Any:
    """transformers' rows of an image in dtype."""
    model, made = tiny_model(family).model.to(dtype), processor()(images=[IMAGES[number]], return_tensors="pt")
    try:
        with torch.no_grad():
            rows = model.get_image_features(
                made["pixel_values"].to(dtype),
                image_sizes=made["image_sizes"],
                vision_feature_layer=-1,
                return_dict=True,
                **({"vision_feature_select_strategy": "full"} if family in PLAIN else {}),
            )
    finally:
        model.float()
    return torch.cat(list(rows.pooler_output)).double().numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    encoder = encoder_of(folders[family])
    word = tiny_tokenizer().token_to_id("[IMG_BREAK]")
    end = tiny_model(family).model.language_model.embed_tokens.weight[word].detach().numpy()
    for number in range(2):
        (pixels,) = RULES.squares_of(Image.fromarray(IMAGES[number])).pixels
        rows, columns = encoder.encode(pixels), pixels.shape[1] // UNIT
        assert len(rows) == encoder.grid_of(pixels.shape)[0] == RULES.rows_of(pixels.shape)
        ends = np.arange(len(rows)) % (columns + 1) == columns
        assert (rows[ends] == end).all()
        exact = theirs(family, number, torch.float64)
        their_error = np.abs(theirs(family, number, torch.float32) - exact)
        check_errors(np.abs(rows[~ends] - exact), their_error)
    load_cpu_library().stop_threads()


def test_tokens_are_those_of_transformers(llm: LLM) -> None:
    cases = [IMAGES[:1], IMAGES[1:3], IMAGES[:3], IMAGES]
    prompts = [asked(*images, text="See" + " [IMG] and" * len(images) + " say.") for images in cases]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, images in zip(outputs, cases, strict=True):
        assert tokens_of([output])[0] == greedy("mistral-small", output.prompt_token_ids, images, 8)
    again = llm.generate(prompts[3], GREEDY, use_tqdm=False)[0]
    assert tokens_of([again]) == tokens_of(outputs[3:])
    assert again.num_cached_tokens > 100
    changed = IMAGES[0].copy()
    changed[:50, :70] ^= 255
    other = llm.generate(asked(changed, text="See [IMG] and say."), GREEDY, use_tqdm=False)[0]
    assert other.prompt_token_ids == outputs[0].prompt_token_ids
    assert other.num_cached_tokens < 16


def test_positions_beyond_the_first_context(folders: dict[str, Path]) -> None:
    """Ministral 3's rotation and queries depend on positions; those of an image's tokens are as any."""
    with LLM(str(folders["ministral3"]), **OPTIONS) as llm:
        prompt = asked(*IMAGES[:3], text="See" + " [IMG] and" * 3 + " what else is there to say of " * 9)
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert len(output.prompt_token_ids) > 256
        assert tokens_of([output])[0] == greedy("ministral3", output.prompt_token_ids, IMAGES[:3], 8)


def test_an_encoder_without_a_merger(folders: dict[str, Path]) -> None:
    """Pixtral-12B in transformers' form, a LLaVA: each patch is a row."""
    with LLM(str(folders["pixtral"]), **OPTIONS) as llm:
        (output,) = llm.generate(asked(*IMAGES[:2], text="See [IMG] and [IMG]"), GREEDY, use_tqdm=False)
        assert tokens_of([output])[0] == greedy("pixtral", output.prompt_token_ids, IMAGES[:2], 8)


def test_a_chat(llm: LLM) -> None:
    parts = [{"type": "image", "image": IMAGES[1]}, {"type": "text", "text": "What is an [IMG] tag?"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert output.prompt == "<s>[INST][IMG]What is an [IMG] tag?[/INST]"
    text = tiny_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
    image = "[IMG_BREAK]".join(["[IMG]" * 5] * 6) + "[IMG_END]"
    assert text == f"<s>[INST]{image}What is an [IMG] tag?[/INST]"
    (prepared,) = llm._engine.prepare([{**asked(IMAGES[1], text=output.prompt), "image_marks": [0]}], GREEDY)  # type: ignore[list-item]
    assert [(one.use.position, one.use.num_rows) for one in prepared.prompt.features] == [(2, 35)]
    with pytest.raises(InvalidRequestError, match=r"has \[IMG\] 0 times but 1 image"):
        llm.generate(asked(IMAGES[1], text="No mark"), GREEDY, use_tqdm=False)


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_transformers(size: tuple[int, int]) -> None:
    image = noise(*size, 5)
    made = processor()(images=[image], return_tensors="np", input_data_format="channels_last")
    (pixels,) = RULES.squares_of(Image.fromarray(image)).pixels
    assert tuple(np.asarray(made["image_sizes"])[0]) == pixels.shape[:2]
    mean, std = (np.array(one, np.float32) for one in (processor().image_mean, processor().image_std))
    ours = ((pixels * (1 / 255)).astype(np.float32) - mean) / std
    assert np.array_equal(ours.transpose(2, 0, 1), np.asarray(made["pixel_values"])[0])


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("vision_feature_layer", [-2, -1], UnsupportedModelError, "vision_feature_layer"),
    ("multimodal_projector_bias", True, UnsupportedModelError, "multimodal_projector_bias"),
    ("projector_hidden_act", "relu", UnsupportedModelError, "projector_hidden_act"),
    ("vision_config.hidden_act", "quick_gelu", UnsupportedModelError, "hidden_act"),
    ("vision_config.model_type", "clip_vision_model", UnsupportedModelError, "model_type='clip_.*'pixtral' is"),
    ("vision_config.hidden_size", 33, ModelFileError, "hidden_size"),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), WRONG)
def test_what_is_not_read_is_refused_by_name(
    name: str, value: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    tiny_model("mistral-small").config.save_pretrained(tmp_path)
    set_setting(tmp_path, ["architectures"], ["Mistral3ForConditionalGeneration"])
    set_setting(tmp_path, name.split("."), value)
    with pytest.raises(error, match=text):
        read_model_config(tmp_path)


def test_a_folder_without_the_token_that_ends_rows(tmp_path: Path) -> None:
    write_checkpoint("mistral-small", tmp_path)
    file = tmp_path / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["added_tokens"] = [one for one in settings["added_tokens"] if one["content"] != "[IMG_BREAK]"]
    file.write_text(json.dumps(settings))
    with pytest.raises(ModelFileError, match=r"\[IMG_BREAK\], which ends a row of an image, has no embedding"):
        encoder_of(tmp_path)
    file.unlink()
    config = EngineConfig(model=str(tmp_path), dtype="float32", max_model_len=512)
    assert load(config, usual_dtype).source.vision is None  # the text runs alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_projector_gives_the_rows_of_the_folder(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    encoder, config = encoder_of(folders[family]), read_model_config(folders[family])
    file, text = write_pixtral_projector(tmp_path / "mmproj-tiny.gguf", family), tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(text, "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_token_list(["a", "[IMG]"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert projector_of(text, None) == file
    row = grid_row(file)
    assert row is not None
    parts, axes = with_grid(config, text, file, row)
    colours = {"image_mean": encoder.parts.image_mean, "image_std": encoder.parts.image_std}  # float32 in the file
    assert (msgspec.structs.replace(parts, **colours), axes) == (encoder.parts, None)
    weights = open_gguf_pixtral(file, encoder.parts, config.hidden_size, FLOAT32)
    other = GridEncoder(encoder.parts, config.hidden_size, weights, FLOAT32, library=load_cpu_library())
    (pixels,) = RULES.squares_of(Image.fromarray(IMAGES[0])).pixels
    assert np.array_equal(other.encode(pixels), encoder.encode(pixels))
    load_cpu_library().stop_threads()
    limits = FeatureLimits(48, 1 << 20, encoder.image_size, encoder.num_rows, any_size=True)
    assert pixtral_images(json.loads(processor_settings(file)), limits, lambda token: RULES.mark_id) == RULES
