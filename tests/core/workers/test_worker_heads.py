"""Draft heads of engines with workers: they read hidden states of all ranks and stages, and no bit changes."""

import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.wire.messages import AddRequest
from tests.core.assistants import AssistedModel
from tests.core.draft_heads import HIDDEN, LLAMA, MIMO, VOCAB, model_shapes, random_weights, write, write_eagle3
from tests.core.executors.test_draft_head import knowing_model
from tests.core.workers.part_answers import LATENT, ROUTED, answers, config_of, kill, requests


def drafting(config: EngineConfig, method: str, head: str | None = None) -> EngineConfig:
    """A step costs so much that each draft pays."""
    settings = {"model": head, "num_speculative_tokens": 3, "step_ns": (10**9,) * 8, "draft_ns": 1}
    return msgspec.structs.replace(config, speculative_config=SpeculativeConfig(method=method, **settings))


def sent() -> list[AddRequest]:
    """The usual requests, with tokens of the vocabulary of the models with heads."""
    prompts = [np.frombuffer(one.prompt_token_ids, "<i4") % (VOCAB - 3) + 3 for one in requests()]
    return [
        msgspec.structs.replace(one, prompt_token_ids=prompt.astype("<i4").tobytes())
        for one, prompt in zip(requests(), prompts, strict=True)
    ]


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose layer for multi-token prediction knows it: it reads the token, and not the hidden state."""
    weights = knowing_model(MIMO)
    projection = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    projection[:, HIDDEN:] = np.eye(HIDDEN)
    weights["model.mtp_layers.0.input_proj.weight"] = projection
    return write(tmp_path_factory.mktemp("mimo"), MIMO, weights)


@pytest.fixture(scope="module")
def mimo_alone(mimo: str) -> list[Any]:
    return answers(config_of(mimo, 1, load_format="auto"), sent=sent())


@pytest.mark.parametrize(
    ("ranks", "stages"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.soak)], ids=["ranks", "stages", "both"]
)
def test_a_layer_that_knows_its_model_is_right(mimo: str, mimo_alone: list[Any], ranks: int, stages: int) -> None:
    """Embeddings and head, of which a worker has a part for the model, are whole for the layer."""
    config = config_of(mimo, ranks, load_format="auto", pipeline_parallel_size=stages)
    least = 80 if stages == 1 else 30  # steps in flight get no drafts
    assert answers(drafting(config, "mtp"), {6: kill(0)}, least_accepted=least, sent=sent()) == mimo_alone


@pytest.mark.parametrize(
    ("ranks", "stages"), [pytest.param(3, 1, marks=pytest.mark.soak), (1, 3)], ids=["ranks", "stages"]
)
def test_a_head_reads_states_of_several_stages(tmp_path: Path, ranks: int, stages: int) -> None:
    model = write(tmp_path / "model", LLAMA, random_weights(model_shapes(LLAMA), 1))
    head = write_eagle3(tmp_path / "head")
    alone = answers(config_of(model, 1, load_format="auto"), sent=sent())
    config = config_of(model, ranks, load_format="auto", pipeline_parallel_size=stages)
    assert answers(drafting(config, "eagle3", head), least_drafts=9, sent=sent()) == alone


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Gemma 4 with layers that share K and V, and an assistant that is often right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and what it imports
        return AssistedModel("gemma4-e2b", 0.3).write(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def gemma_alone(gemma: tuple[str, str]) -> list[Any]:
    return answers(config_of(gemma[0], 1, load_format="auto", num_gpu_blocks_override=16), sent=short())


def short() -> list[AddRequest]:
    """The usual requests, with tokens of the vocabulary of Gemma's tests."""
    prompts = [np.frombuffer(one.prompt_token_ids, "<i4") % 290 + 3 for one in requests()]
    return [
        msgspec.structs.replace(one, prompt_token_ids=prompt.astype("<i4").tobytes())
        for one, prompt in zip(requests(), prompts, strict=True)
    ]


@pytest.mark.parametrize(
    ("ranks", "worker"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.soak)], ids=["two", "three"]
)
def test_an_assistant_is_run_by_all_ranks(
    gemma: tuple[str, str], gemma_alone: list[Any], ranks: int, worker: int
) -> None:
    """Each rank has the K and V of some heads, of layers of two kinds."""
    config = config_of(gemma[0], ranks, load_format="auto")
    disturb = {6: kill(worker)}
    assert answers(drafting(config, "mtp", gemma[1]), disturb, least_accepted=20, sent=short()) == gemma_alone


@pytest.mark.soak
def test_an_assistant_is_in_the_last_stage(tmp_path: Path) -> None:
    """With the layers whose K and V it reads; with fewer layers that stage is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, assistant = AssistedModel("gemma4-31b", 0.3).write(tmp_path)
    alone = answers(config_of(model, 1, load_format="auto", num_gpu_blocks_override=16), sent=short())
    for ranks, stages in ((1, 2), (2, 2)):
        config = config_of(model, ranks, load_format="auto", pipeline_parallel_size=stages)
        assert answers(drafting(config, "mtp", assistant), {6: kill(0)}, least_accepted=5, sent=short()) == alone
    config = config_of(model, 1, load_format="auto", pipeline_parallel_size=4)
    with pytest.raises(ConfigError, match="reads K and V of layer 2, which is not in the last of the stages"):
        answers(drafting(config, "mtp", assistant), sent=short())


@pytest.mark.soak
def test_an_assistant_reads_shared_keys_and_values_in_the_last_stage(
    gemma: tuple[str, str], gemma_alone: list[Any]
) -> None:
    """The first stage also passes on what the inputs of single layers are made of."""
    for ranks in (1, 2):
        config = config_of(gemma[0], ranks, load_format="auto", pipeline_parallel_size=2)
        assert answers(drafting(config, "mtp", gemma[1]), {6: kill(0)}, least_accepted=5, sent=short()) == gemma_alone


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "dtype"),
    [
        ("routed", 2, 1, "float32"),
        *(
            pytest.param(name, ranks, stages, dtype, marks=pytest.mark.soak)
            for name in ("routed", "latent")
            for ranks, stages in ((2, 1), (3, 1), (1, 2), (2, 2))
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_layers_of_routed_models(tmp_path: Path, name: str, ranks: int, stages: int, dtype: str) -> None:
    """Of which some have recurrent states, and some latent attention."""
    (tmp_path / "config.json").write_text(json.dumps(ROUTED if name == "routed" else LATENT))
    alone = answers(config_of(str(tmp_path), 1, dtype=dtype))
    config = config_of(str(tmp_path), ranks, pipeline_parallel_size=stages, dtype=dtype)
    assert answers(drafting(config, "mtp"), {9: kill(ranks * stages - 1)}, least_drafts=9) == alone
