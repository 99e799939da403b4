"""Drafts of models and heads on several GPUs: each makes the same ones, and every bit is that of one GPU without."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.workers import processes
from ipc.machine.child_process import run_package
from ipc.wire.messages import AddRequest
from tests.core.draft_heads import LLAMA, model_shapes, random_weights, write_eagle3
from tests.core.draft_heads import write as head_files
from tests.core.workers.part_answers import LATENT, MODEL, ROUTED, answers, config_of, kill, requests
from tests.core.workers.test_worker_heads import drafting, sent
from tests.triton_device import ANYWHERE, ON_GPU

pytestmark = [*ANYWHERE, pytest.mark.soak, pytest.mark.timeout(900)]

OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 64, "num_gpu_blocks_override": 7}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers under the interpreter have the products of a tensor core."""

    def run(package: str, *rest: Any) -> Any:
        return run_package(package if ON_GPU else "tests.core.workers.emulated", *rest)

    monkeypatch.setattr(processes, "run_package", run)


def write(folder: Path, settings: dict[str, Any], **changes: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    return str(folder)


def check(model: str, sent: list[AddRequest], method: str, head: str | None = None, **least: int) -> None:
    """Of two ranks one is killed."""
    options = {**OPTIONS, "load_format": "auto"} if (Path(model) / "model.safetensors").exists() else OPTIONS
    alone = answers(config_of(model, 1, **options), sent=sent)
    config = config_of(model, 2, **options)
    assert answers(drafting(config, method, head), {9: kill(1)}, sent=sent, **least) == alone


def test_a_layer_of_latent_attention_and_experts(tmp_path: Path) -> None:
    """Its embeddings and its head are those of both ranks."""
    model = write(tmp_path / "model", LATENT, num_hidden_layers=2)
    check(model, requests(4, 8), "mtp", least_drafts=3)


def test_a_layer_of_routed_models_with_states(tmp_path: Path) -> None:
    model = write(tmp_path / "model", ROUTED, num_hidden_layers=2)
    check(model, requests(4, 16), "mtp", least_drafts=3)


def test_a_model_that_is_its_own_draft(tmp_path: Path) -> None:
    model = write(tmp_path / "model", MODEL, num_hidden_layers=1)
    check(model, requests(4, 16), "draft_model", model, least_accepted=9)


def test_a_head_that_reads_states_of_several_layers(tmp_path: Path) -> None:
    settings = {**LLAMA, "num_hidden_layers": 4}
    model = head_files(tmp_path / "model", settings, random_weights(model_shapes(settings), 1))
    check(model, sent()[:4], "eagle3", write_eagle3(tmp_path / "head"), least_drafts=3)
