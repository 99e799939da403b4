"""Images from LLM on with --device cuda: under Triton's interpreter the CPU's tokens, or vectors, for each family."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_core import LLM, SamplingParams
from frontend.engine import child
from ipc.machine.child_process import run_package
from tests.core.models import (
    embedding_gemma2_checkpoint,
    gemma3_checkpoint,
    gemma4_images_checkpoint,
    grid_checkpoints,
    idefics3_checkpoint,
    internvl_checkpoint,
    lfm2_vl_checkpoint,
    mistral3_checkpoint,
)
from tests.core.models.idefics3_checkpoint import noise

pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # of transformers and what it imports

_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
#: By name: writes a checkpoint into a folder; and the mark of an image in a prompt.
MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "gemma3": (gemma3_checkpoint.write_checkpoint, "<start_of_image>"),
    "idefics3": (idefics3_checkpoint.write_checkpoint, "<image>"),
}
for _name in gemma4_images_checkpoint.FAMILIES:
    MODELS[f"gemma4 {_name}"] = partial(gemma4_images_checkpoint.write_checkpoint, _name), "<|image|>"
for _name in grid_checkpoints.FAMILIES:
    MODELS[_name] = partial(grid_checkpoints.write_checkpoint, _name), _QWEN
for _name in internvl_checkpoint.FAMILIES:
    MODELS[f"internvl {_name}"] = partial(internvl_checkpoint.write_checkpoint, _name), "<IMG_CONTEXT>"
for _name in lfm2_vl_checkpoint.FAMILIES:
    MODELS[_name] = partial(lfm2_vl_checkpoint.write_checkpoint, _name), "<image>"
for _name in mistral3_checkpoint.FAMILIES:
    MODELS[f"mistral3 {_name}"] = partial(mistral3_checkpoint.write_checkpoint, _name), "[IMG]"

IMAGES = [noise(16, 16, 1), noise(9, 12, 2)]


def answers(model: str, mark: str, **options: Any) -> list[list[int]]:
    """One prompt has two images, the other has none."""
    params, images = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), {"image": IMAGES}
    prompts: list[Any] = [{"prompt": f"See {mark} and {mark}.", "multi_modal_data": images}, "Why?"]
    with LLM(model=model, dtype="float32", threads=1, max_model_len=400, max_num_seqs=2, **options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, mark = MODELS[name]
    folder = str(write(tmp_path))
    expected = answers(folder, mark)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(child, "run_package", lambda _, *rest: run_package("tests.core.emulated", *rest))
    assert answers(folder, mark, device="cuda", num_blocks_override=200) == expected


def embedded(model: str, **options: Any) -> list[Any]:
    """Vectors of a prompt with two images, and of one without; the first one's also alone."""
    prompts: list[Any] = [{"prompt": "See <|image|> and <|image|>.", "multi_modal_data": {"image": IMAGES}}, "Why?"]
    with LLM(model=model, dtype="float32", threads=1, max_num_seqs=2, **options) as llm:
        return [one.vectors for each in (prompts, prompts[:1]) for one in llm.embed(each, use_tqdm=False)]


@pytest.mark.timeout(900)
def test_vectors_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(embedding_gemma2_checkpoint.write_checkpoint(tmp_path))
    expected = embedded(folder)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(child, "run_package", lambda _, *rest: run_package("tests.core.emulated", *rest))
    found = embedded(folder, device="cuda", num_blocks_override=200)
    assert np.array_equal(found[2], found[0])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
