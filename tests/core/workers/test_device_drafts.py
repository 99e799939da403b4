"""Drafts of models and heads on several GPUs: each makes the same ones, and every bit is that of one GPU without."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.workers import processes
from ipc.machine.child_process import run_package
from tests.core.workers.part_answers import LATENT, MODEL, ROUTED, answers, config_of, kill, requests
from tests.core.workers.test_worker_heads import drafting
from tests.triton_device import ANYWHERE, ON_GPU

pytestmark = ANYWHERE

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


def test_a_layer_of_latent_attention_and_experts(tmp_path: Path) -> None:
    """Its embeddings and its head are those of both ranks."""
    model = write(tmp_path / "model", LATENT, num_hidden_layers=2)
    sent = requests(4, 8)
    alone = answers(config_of(model, 1, **OPTIONS), sent=sent)
    config = config_of(model, 2, **OPTIONS)
    assert answers(drafting(config, "mtp"), least_drafts=3, sent=sent) == alone
