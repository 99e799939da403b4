"""Gemma 4's assistants as drafts: they are transformers' assistant's, and no token changes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.executors.local import LocalExecutor
from ipc.errors import ConfigError, ModelFileError, UnsupportedModelError
from ipc.options.resolved import ResolvedConfig
from tests.core.assistants import CLUSTERS, AssistedModel
from tests.core.executors.test_draft_head import CROWDED, EDITS, GREEDY, config_of, run
from tests.core.models.checkpoints import with_random_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

PLAIN, LARGE = "gemma4-e2b", "gemma4-31b"
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22}
#: Case -> the assistant's settings.
CASES: dict[str, dict[str, Any]] = {PLAIN: CLUSTERS, LARGE: {}, "gemma4-26b-a4b": {}, "gemma4-12b": CLUSTERS}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the models of a case, and the folders of the model and of its assistant."""

    @cache
    def of(case: str, share: float | None = None) -> tuple[AssistedModel, str, str]:
        pair = AssistedModel(case, share, None if share is not None else CASES[case])
        return pair, *pair.write(tmp_path_factory.mktemp(case))

    return of


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_transformers_and_no_token_changes(pairs: Any, case: str) -> None:
    """Most contexts are longer than the window."""
    reference, model, assistant = pairs(case)
    plain, _, _ = run(config_of(model, None, **OPTIONS), num_requests=6)
    assert run(config_of(model, "mtp", assistant, **OPTIONS), num_requests=6)[0] == plain
    _, stats, heard = run(config_of(model, "mtp", assistant, **OPTIONS), GREEDY, 6)
    for tokens, drafts in heard[:: len(heard) // 12]:
        reference.check(tokens, drafts)
    assert len(heard) > 100
    assert {len(drafts) for _, drafts in heard} == {3}
    assert stats.num_draft_tokens > 5


@pytest.mark.parametrize("crowd", CROWDED)
def test_no_token_changes_whatever_comes_between(pairs: Any, crowd: str) -> None:
    reference, model, assistant = pairs(PLAIN)
    options = CROWDED[crowd]
    plain, _, _ = run(config_of(model, None, **options), EDITS, 10)
    got, stats, heard = run(config_of(model, "mtp", assistant, **options), EDITS, 10)
    assert got == plain
    assert stats.num_draft_tokens > 5
    assert (stats.num_preemptions > 0) == ("chunks" not in crowd)
    _, _, heard = run(config_of(model, "mtp", assistant, **options), GREEDY)
    for tokens, drafts in heard[:: len(heard) // 12]:
        reference.check(tokens, drafts)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_other_arithmetic(pairs: Any, options: dict[str, Any]) -> None:
    _, model, assistant = pairs(PLAIN)
    plain, _, _ = run(config_of(model, None, **options), num_requests=4)
    got, _, heard = run(config_of(model, "mtp", assistant, **options), num_requests=4)
    assert got == plain
    assert len(heard) > 50


def test_an_assistant_that_knows_its_model_saves_steps(pairs: Any) -> None:
    _, model, assistant = pairs(LARGE, 0.01)
    plain, plain_stats, _ = run(config_of(model, None))
    got, stats, _ = run(config_of(model, "mtp", assistant))
    assert got == plain
    assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens > 50
    assert stats.num_steps < 0.7 * plain_stats.num_steps


def test_positions_of_a_power_of_two(pairs: Any) -> None:
    """The assistant's position is that of a token which is not in its context."""
    reference, model, assistant = pairs(LARGE)
    sizes = {"max_model_len": 1024, "num_blocks_override": 140, "max_num_batched_tokens": 1100}
    _, _, heard = run(config_of(model, "mtp", assistant, **sizes), GREEDY, 1, num_tokens=1010)
    at_end = [(tokens, drafts) for tokens, drafts in heard if len(tokens) > 1000]
    for tokens, drafts in at_end[-2:]:
        reference.check(tokens, drafts)
    assert at_end


@pytest.mark.parametrize("case", [PLAIN, LARGE])
def test_gguf_files(pairs: Any, case: str, tmp_path: Path) -> None:
    """They lack the clusters of tokens, and all tokens have logits."""
    whole = AssistedModel(case)
    model, assistant = whole.write_gguf(tmp_path)
    plain, _, _ = run(config_of(model, None, **OPTIONS), num_requests=4)
    assert run(config_of(model, "mtp", assistant, **OPTIONS), num_requests=4)[0] == plain
    _, _, heard = run(config_of(model, "mtp", assistant, **OPTIONS), GREEDY, 4)
    for tokens, drafts in heard[:: len(heard) // 8]:
        whole.check(tokens, drafts)
    assert len(heard) > 50
    _, folder, _ = pairs(case)
    other = pairs(LARGE if case == PLAIN else PLAIN)[1]
    with pytest.raises(ConfigError, match="reads K and V of"):
        LocalExecutor(config_of(other, "mtp", assistant))
    assert run(config_of(folder, "mtp", assistant, **OPTIONS), num_requests=4)[2]  # of a file for a folder


def test_it_follows_new_weights_of_its_model(pairs: Any, tmp_path: Path) -> None:
    _, model, assistant = pairs(LARGE)
    other = AssistedModel(LARGE)
    with_random_weights(other.model, 21)
    new, _ = other.write(tmp_path)

    class Updated(LocalExecutor):
        def initialize_cache(self, config: ResolvedConfig) -> None:
            super().initialize_cache(config)
            self.use_weights(self.prepare_weights(new, 1))

    plain, _, _ = run(config_of(new, None), GREEDY, 3)
    got, _, heard = run(config_of(model, "mtp", assistant), GREEDY, 3, make=Updated)
    assert got == plain != run(config_of(model, None), GREEDY, 3)[0]
    for tokens, drafts in heard[:: len(heard) // 8]:
        other.check(tokens, drafts)


def test_made_up_weights(pairs: Any) -> None:
    for case in (PLAIN, LARGE):
        _, model, assistant = pairs(case)
        plain, _, _ = run(config_of(model, None, load_format="dummy"), num_requests=3)
        assert run(config_of(model, "mtp", assistant, load_format="dummy"), num_requests=3)[0] == plain


def test_it_has_no_k_and_v(pairs: Any) -> None:
    _, model, assistant = pairs(LARGE)
    blocks = [
        LocalExecutor(config_of(model, *method)).determine_num_available_blocks(1 << 22, 8)
        for method in ((None,), ("mtp", assistant))
    ]
    assert blocks[0] == blocks[1]


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text", "error", "match"),
    [
        ({"backbone_hidden_size": 64}, {}, ConfigError, "reads hidden states of 64 numbers, but the model's have 48"),
        ({}, {"vocab_size": 304}, ConfigError, "is for a model with 304 tokens, but the model has 300"),
        (
            {},
            {"num_key_value_heads": 4},
            ConfigError,
            r"reads K and V of \(4, 32\) heads and numbers in layers that see all tokens; the model's: \(2, 32\)",
        ),
        (
            {},
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300},
            UnsupportedModelError,
            "hidden_size_",
        ),
        ({"num_centroids": 7}, {}, ModelFileError, "num_centroids must divide the 300 tokens; got 7"),
        ({"centroid_intermediate_top_k": 11}, {}, ModelFileError, "must be at most num_centroids=10; got 11"),
        ({"text_config": None}, {}, ModelFileError, "text_config is missing"),
    ],
    ids=str,
)
def test_assistants_that_do_not_fit(
    pairs: Any, tmp_path: Path, settings: dict[str, Any], text: dict[str, Any], error: Any, match: str
) -> None:
    _, model, assistant = pairs(PLAIN)
    own = json.loads((Path(assistant) / "config.json").read_text())
    own["text_config"] |= text
    (tmp_path / "config.json").write_text(json.dumps(own | settings))
    with pytest.raises(error, match=match):
        LocalExecutor(config_of(model, "mtp", str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "tensor", "error", "match"),
    [
        ("masked_embedding.token_ordering", None, ModelFileError, "tensor masked_embedding.token_ordering is missing"),
        (
            "masked_embedding.token_ordering",
            torch.zeros(300, dtype=torch.int64),
            ModelFileError,
            "each of the 300 tokens",
        ),
        ("post_projection.weight", None, ModelFileError, "tensor model.layers.0.post_projection.weight is missing"),
        ("more.weight", torch.zeros(2), UnsupportedModelError, "unexpected tensor 'more.weight'"),
    ],
)
def test_weights_that_do_not_fit(
    pairs: Any, tmp_path: Path, name: str, tensor: torch.Tensor | None, error: Any, match: str
) -> None:
    _, model, assistant = pairs(PLAIN)
    tensors = load_file(Path(assistant) / "model.safetensors") | {name: tensor}
    save_file({name: each for name, each in tensors.items() if each is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((Path(assistant) / "config.json").read_text())
    with pytest.raises(error, match=match):
        LocalExecutor(config_of(model, "mtp", str(tmp_path)))


def test_models_that_do_not_fit(pairs: Any) -> None:
    _, model, assistant = pairs(LARGE)
    with pytest.raises(ConfigError, match="needs the C kernels"):
        LocalExecutor(config_of(model, "mtp", assistant, cpu_kernels="torch"))
    with pytest.raises(ConfigError, match=r"no multi-token prediction layer"):
        LocalExecutor(config_of(model, "mtp"))
    with pytest.raises(UnsupportedModelError, match="drafts for another model: name that one, and this in specul"):
        LocalExecutor(config_of(assistant, None))
