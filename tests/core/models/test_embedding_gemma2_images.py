"""EmbeddingGemma 2 with images: vectors are those of transformers, in any company; limits, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.model_files.model_config import read_model_config
from core.models import encoder_run
from core.models.grid_parts import GridParts
from engine_core import LLM, InvalidRequestError, PoolingParams, UnsupportedParameterError
from ipc.options.config import EngineConfig
from ipc.params.pooling_params import PoolingParams as Params
from ipc.records.receipt import ids_bytes
from ipc.wire.pooling_messages import AddPooling
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from tests.core.models.embedding_gemma2_checkpoint import PROMPTS, WIDTH, their_states, their_vector, write_checkpoint
from tests.core.models.float_errors import check_errors
from tests.core.models.idefics3_checkpoint import noise
from tests.core.models.test_pooling_models import unit
from tests.in_turn import in_turn
from tools.commands.verify.vector_verifier import PooledClaim, VectorVerifier

pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(100, 150, 1), noise(33, 25, 2), noise(200, 60, 3), noise(9, 120, 4)]
MARK = "<|image|>"
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "max_num_seqs": 4, "threads": 1}
#: (name of the prompt, text, indices of the images)
CASES = [
    ("", MARK, (0,)),
    ("", f"{MARK} {MARK}", (1, 0)),
    ("query", f"What is {MARK} here?", (2,)),
    ("document", f"{MARK}{MARK} a longer text, between images {MARK}, and behind.", (3, 1, 2)),
    ("STS", f"one {MARK} two {MARK} three {MARK} four {MARK} five", (0, 1, 2, 3)),
    ("", f"the same image {MARK} twice {MARK}", (0, 0)),
    ("query", "no image", ()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("embedding_gemma2"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def asked(text: str, *images: int) -> Any:
    return {"prompt": text, "multi_modal_data": {"image": [IMAGES[index] for index in images]}}


def other(kind: str) -> Any:
    return {"prompt": "x", "multi_modal_data": {kind: b"x"}}


def test_vectors_are_those_of_transformers(llm: LLM) -> None:
    seen = set[bytes]()
    for name, text, images in CASES:
        (output,) = llm.embed(asked(text, *images), use_tqdm=False, prompt_name=name)
        whole, own = PROMPTS.get(name, "") + text, [IMAGES[index] for index in images]
        assert output.prompt_token_ids == their_states(whole, own)[0]
        vector = np.array(output.outputs.embedding, np.float32)
        np.testing.assert_allclose(vector, their_vector(whole, own), atol=1e-5)
        seen.add(vector.tobytes())
    assert len(seen) == len(CASES)
    images_alone = llm.embed(asked(f"{MARK} {MARK}", 1, 0), use_tqdm=False)[0]
    assert images_alone.prompt_token_ids == their_states(None, [IMAGES[1], IMAGES[0]])[0]


def test_company_changes_no_bit(llm: LLM) -> None:
    prompts = [asked(text, *images) for _, text, images in CASES]
    together = llm.embed(prompts, use_tqdm=False)
    for prompt, one in zip(prompts, together, strict=True):
        (alone,) = llm.embed(prompt, use_tqdm=False)
        assert alone.vectors.tobytes() == one.vectors.tobytes()
    for prompt, one in zip(prompts[::-1], llm.embed(prompts[::-1], use_tqdm=False), strict=True):
        assert one.vectors.tobytes() == together[prompts.index(prompt)].vectors.tobytes()


def test_each_token_and_fewer_numbers(llm: LLM) -> None:
    _, text, images = CASES[3]
    own = [IMAGES[index] for index in images]
    states, exact = their_states(text, own)[1], their_states(text, own, torch.float64)[1]
    plain = PoolingParams(use_activation=False)
    (each,) = llm.encode(asked(text, *images), plain, use_tqdm=False, pooling_task="token_embed")
    check_errors(abs(each.outputs.data - exact), abs(states - exact))
    (short,) = llm.embed(asked(text, *images), use_tqdm=False, pooling_params=PoolingParams(dimensions=8))
    np.testing.assert_allclose(short.outputs.embedding, unit(states.mean(0)[:8]), atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        (asked(f"{MARK} {MARK}", 0), {}, InvalidRequestError, "2 times but 1 image"),
        (other("audio"), {}, UnsupportedParameterError, "has audio: this version reads only images"),
        (other("video"), {}, UnsupportedParameterError, "has video: this version reads only images"),
        (asked(MARK, 0), {"truncate_prompt_tokens": 9}, UnsupportedParameterError, "truncate_prompt_tokens cannot be"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": IMAGES[0]}}, {}, InvalidRequestError, "that is text"),
        ({"prompt_embeds": np.zeros((2, 48), np.float32)}, {}, InvalidRequestError, "takes no prompt_embeds: it pools"),
        (asked(MARK * 12, *([0] * 12)), {}, InvalidRequestError, "are more than 700: send fewer"),
    ],
)
def test_what_is_refused(llm: LLM, prompt: Any, params: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.embed(prompt, use_tqdm=False, pooling_params=PoolingParams(**params))


def test_all_layers_see_later_tokens(folder: Path) -> None:
    """In Gemma 4 only those with a window do, and only tokens of images."""
    config = read_model_config(folder)
    assert (config.is_causal, config.wholes_in_windows, config.max_position_embeddings) == (False, False, 700)
    assert isinstance(config.vision, GridParts)
    assert not config.vision.sees_whole


def test_limits(folder: Path) -> None:
    """An image of at most 20 rows of 12 x 12 pixels, and at most 2 images."""
    with LLM(str(folder), **OPTIONS, limit_mm_per_prompt={"image": 2}, image_max_pixels=20 * 144) as llm:
        (output,) = llm.embed(asked(MARK, 0), use_tqdm=False)
        assert len(output.prompt_token_ids) == 5 * 3 + 4
        with pytest.raises(InvalidRequestError, match="has 3 images; this engine takes at most 2"):
            llm.embed(asked(MARK * 3, 0, 1, 2), use_tqdm=False)


def test_a_folder_without_an_encoder_embeds_texts_alone(llm: LLM, folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vision_config": None}))
    with LLM(str(model), **OPTIONS) as text:
        assert text.client.welcome.features is None
        (expected,), (found,) = (each.embed("a text", use_tqdm=False) for each in (llm, text))
        assert found.vectors.tobytes() == expected.vectors.tobytes()
        with pytest.raises(UnsupportedParameterError, match="takes no images"):
            text.embed(asked(MARK, 0), use_tqdm=False)


@pytest.mark.parametrize("settings", [None, {"image_processor_type": "OtherImageProcessor"}])
def test_a_folder_without_a_known_image_processor_embeds_texts_alone(
    llm: LLM, folder: Path, tmp_path: Path, settings: dict[str, str] | None
) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    for name in ("processor_config.json", "preprocessor_config.json"):
        (model / name).unlink(missing_ok=True)
    if settings is not None:
        (model / "preprocessor_config.json").write_text(json.dumps(settings))
    with LLM(str(model), **OPTIONS) as text:
        (expected,), (found,) = (each.embed("a text", use_tqdm=False) for each in (llm, text))
        assert found.vectors.tobytes() == expected.vectors.tobytes()
        with pytest.raises(UnsupportedParameterError, match="has no image processor"):
            text.embed(asked(MARK, 0), use_tqdm=False)


@pytest.mark.parametrize(("variant", "dtype"), in_turn(usable_variants(), ["float32", "bfloat16"]))
def test_bits_are_the_requests_own(dtype: Any, variant: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, among others with the same and other images, and with images encoded in parts over several steps."""
    config = EngineConfig(**{**OPTIONS, "model": str(folder), "dtype": dtype, "cpu_kernels": variant})
    engine = VectorVerifier(config)
    try:
        claims = [_claim(engine, text, images) for _, text, images in CASES]
        alone = [_bits(engine, claim)[0] for claim in claims]
        assert len(set(alone)) == len(claims)
        for order in ((0, 1, 2, 3, 4, 5, 6), (6, 4, 0, 0, 5), (5, 3, 1)):
            assert _bits(engine, *(claims[index] for index in order)) == [alone[index] for index in order]
        before = engine.num_steps
    finally:
        engine.close()
    monkeypatch.setattr(encoder_run, "PART_WORK", 1 << 19)
    engine = VectorVerifier(config)
    try:
        assert _bits(engine, *claims) == alone
        assert engine.num_steps > before, "no image was encoded in parts"
    finally:
        engine.close()
        load_cpu_library(variant).stop_threads()


def _claim(engine: VectorVerifier, text: str, images: tuple[int, ...]) -> PooledClaim:
    assert engine.images is not None
    assert engine.tokenizer is not None
    read = engine.images.read(text, [IMAGES[index] for index in images], "a prompt")
    ids = engine.tokenizer.encode(read.text)
    placed = read.place(ids)
    message = AddPooling(0, ids_bytes(ids), Params(task="embed"), features=[one.use for one in placed])
    return PooledClaim(message, [one.feature for one in placed])


def _bits(engine: VectorVerifier, *claims: PooledClaim) -> list[bytes]:
    found = engine.compute(claims)
    assert all(isinstance(one, np.ndarray) and one.shape == (1, WIDTH) for one in found), found
    return [one.tobytes() for one in found if isinstance(one, np.ndarray)]
