"""Images and given embeddings of engines with workers: the engine encodes, all ranks read, and no bit changes."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.workers.sent_features import sent_features
from engine_core import LLM, SamplingParams
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from tests.core.models import gemma3_checkpoint, gemma4_images_checkpoint, grid_checkpoints, idefics3_checkpoint
from tests.core.models.idefics3_checkpoint import noise
from tests.core.workers.test_nodes import free_port, machines, over
from tests.core.workers.test_worker_tiers import children_of

pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]  # of transformers and what it imports

_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
#: Writes a checkpoint, and the mark of an image. Tokens with three positions and hidden states that images add to after
#: several layers; tokens of an image that see later ones of it, in layers with a window only; images of one size.
MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "qwen3-vl": (partial(grid_checkpoints.write_checkpoint, "qwen3-vl"), _QWEN),
    "gemma4": (partial(gemma4_images_checkpoint.write_checkpoint, "e4b"), "<|image|>"),
    "gemma3": (gemma3_checkpoint.write_checkpoint, "<start_of_image>"),
    "idefics3": (idefics3_checkpoint.write_checkpoint, "<image>"),
}
IMAGES = [noise(100, 150, 1), noise(48, 48, 2), noise(90, 60, 3)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 600, "max_num_seqs": 3}
OPTIONS |= {"max_num_batched_tokens": 300, "kv_cache_memory_bytes": 1 << 22}
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True, logprobs=2) for t in (0.0, 0.8, 0.0)]


def answers(llm: LLM, mark: str) -> list[Any]:
    """Two prompts have images, of which one is in both, and one has none."""
    shown = [IMAGES[:2], IMAGES[1:]]
    prompts: list[Any] = [
        {"prompt": f"See {mark} and {mark}.", "multi_modal_data": {"image": images}} for images in shown
    ]
    outputs = llm.generate([*prompts, "Why is it so?"], PARAMS, use_tqdm=False)
    return [
        [[(token, each.logprob) for token, each in place.items()] for place in output.outputs[0].logprobs or ()]
        for output in outputs
    ]


def check(folder: str, mark: str, **options: Any) -> None:
    with LLM(folder, **OPTIONS) as llm:
        expected, fingerprint = answers(llm, mark), llm.client.welcome.model_fingerprint
    assert len({str(each) for each in expected}) == 3
    with LLM(folder, **OPTIONS, **options) as llm:
        assert llm.client.welcome.model_fingerprint == fingerprint
        assert answers(llm, mark) == expected
        llm.reset_prefix_cache()
        os.kill(children_of(llm.client.welcome.pid)[-1], signal.SIGKILL)
        assert answers(llm, mark) == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-vl", {"tensor_parallel_size": 2}),
        ("gemma4", {"pipeline_parallel_size": 2}),
        pytest.param("qwen3-vl", {"distributed_executor_backend": "mp"}, marks=pytest.mark.soak),
        *(
            pytest.param(name, {"tensor_parallel_size": size}, marks=pytest.mark.soak)
            for name in MODELS
            for size in (2, 3)
        ),
        *(
            pytest.param(
                name, {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}, marks=pytest.mark.soak
            )
            for name in MODELS
            for ranks, stages in ((1, 2), (2, 2))
        ),
    ],
    ids=str,
)
def test_every_bit_is_that_of_one_process(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    write, mark = MODELS[name]
    check(str(write(tmp_path)), mark, **options)


#: Large images for tiny ones, and messages of a few rows: the engine imports this before everything else.
_IN_PARTS = """
import core.models.encoder_run as encoder_run
import core.workers.sent_features as sent_features
encoder_run.PART_WORK, sent_features.MESSAGE_BYTES = 1 << 18, 1 << 10
"""


def test_images_that_are_encoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have parts of an image and no rows, and an image's rows arrive in several messages."""
    (tmp_path / "sitecustomize.py").write_text(_IN_PARTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("ENGINE_CORE_TESTS_EXEC", "1")
    write, mark = MODELS["qwen3-vl"]
    check(str(write(tmp_path)), mark, tensor_parallel_size=2)
    check(str(tmp_path), mark, pipeline_parallel_size=2)


@pytest.mark.soak
def test_the_first_stage_is_on_this_machine_and_the_second_on_another(tmp_path: Path) -> None:
    write, mark = MODELS["gemma4"]
    folder = str(write(tmp_path / "model"))
    with LLM(folder, **OPTIONS) as llm:
        expected = answers(llm, mark)
    port = free_port()
    with (
        machines(tmp_path, port, 1, "--model", folder) as (other,),
        LLM(folder, pipeline_parallel_size=2, **over(port, 2), **OPTIONS) as llm,
    ):
        assert answers(llm, mark) == expected
        llm.reset_prefix_cache()
        other.fail()
        assert answers(llm, mark) == expected


def test_a_scheduler_that_may_plan_no_images_is_refused(tmp_path: Path) -> None:
    path = str(MODELS["qwen3-vl"][0](tmp_path))
    with pytest.raises(ConfigError, match="scheduler_cls='mine:create' may plan no images"):
        sent_features(EngineConfig(model=path, scheduler_cls="mine:create"), "float32")
    config = EngineConfig(model=path, scheduler_cls="mine:create", limit_mm_per_prompt={"image": 0})
    assert sent_features(config, "float32") is not None


@pytest.mark.soak
def test_given_embeddings_reach_all_ranks(tmp_path: Path) -> None:
    folder = str(MODELS["idefics3"][0](tmp_path))
    rows = np.random.default_rng(1).standard_normal((20, 48), np.float32)

    def ask(**options: Any) -> list[int]:
        with LLM(folder, **OPTIONS, enable_prompt_embeds=True, **options) as llm:
            (output,) = llm.generate([{"prompt_embeds": rows}], PARAMS[0], use_tqdm=False)
            return list(output.outputs[0].token_ids)

    assert ask(tensor_parallel_size=2) == ask()
