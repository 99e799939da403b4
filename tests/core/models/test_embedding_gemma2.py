"""EmbeddingGemma 2: hidden states and vectors against transformers, and what its files may say."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.model_files.model_config import read_model_config
from core.model_files.pooling import read_pooler
from core.model_files.tensors.weights import load_weights
from core.models.config import HeadSizes, PerLayerParts
from core.models.llama import Llama
from engine_core import LLM, LoRARequest
from ipc.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ipc.options.config import EngineConfig
from ipc.tables.arrays import Floats
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from tests.core.adapters.peft_files import write_peft
from tests.core.models.checkpoints import SIZES, with_random_weights
from tests.core.models.float_errors import check_errors
from tests.core.models.test_encoders import hidden
from tests.core.models.test_pooling_models import SMALL, add_modules, unit, vectors

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

_RNG = np.random.Generator(np.random.PCG64(6))
#: One prompt has several windows, and more tokens than a tile of the context.
PROMPTS = [_RNG.integers(3, 290, length).tolist() for length in (1, 7, 300, 16, 65)]
_KINDS = ["sliding_attention", "full_attention"]
TINY: dict[str, Any] = {
    **SIZES,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "layer_types": _KINDS * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 24,
    "embedding_dim": 40,
}
_SCALED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    "full_attention": {"rope_type": "linear", "rope_theta": 2e5, "factor": 4.0},
}
_PART = {**_SCALED, "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}
CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "biases, and a window of one token on each side": {"attention_bias": True, "sliding_window": 1},
    "one size of heads": {"global_head_dim": 16, "num_global_key_value_heads": 2, "rope_parameters": _SCALED},
    "a first layer without a window": {"layer_types": [*_KINDS[::-1], *_KINDS]},
    "no windows": {"layer_types": _KINDS[1:] * 4, "rope_parameters": _PART},
}


def build(case: str) -> Any:
    import transformers

    config = transformers.EmbeddingGemma2TextConfig(**TINY | CASES[case], attn_implementation="eager")
    model = with_random_weights(transformers.EmbeddingGemma2TextModel(config).eval())
    for number, layer in enumerate(model.layers):
        layer.layer_scalar.fill_(0.5 + 0.2 * number)
    return model


def load(folder: Path, dtype: Dtype = FLOAT32) -> Llama:
    config, library = read_model_config(folder), load_cpu_library()
    return Llama(config, load_weights(folder, config, dtype, library), dtype, library=library)


@torch.no_grad()
def states(model: Any, ids: list[int]) -> Floats:
    """Return transformers' projected hidden states of a prompt."""
    found: Floats = model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
    return found


def projected(ours: Llama, found: Floats) -> Any:
    assert ours.to_embedding is not None
    return found.astype(np.float64) @ ours.to_embedding.astype(np.float64).T


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = build(case)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    single = [states(theirs, ids) for ids in PROMPTS]
    theirs.double()
    exact = np.concatenate([states(theirs, ids) for ids in PROMPTS])
    found = hidden(ours, PROMPTS)
    check_errors(abs(projected(ours, np.concatenate(found)) - exact), abs(np.concatenate(single) - exact))
    for ids, one in zip(PROMPTS, found, strict=True):
        assert hidden(ours, [ids], 8)[0].tobytes() == one.tobytes()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder like the published one: with encoders of images and audio, and sentence-transformers' files."""
    import transformers

    folder = tmp_path_factory.mktemp("embedding_gemma2")
    text = build("as published")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.Gemma4VisionConfig(
        **small, intermediate_size=40, num_key_value_heads=2, head_dim=16, patch_size=4, position_embedding_size=840
    )
    audio = transformers.Gemma4AudioConfig(**small, output_proj_dims=32)
    marks = {f"{name}_token_id": 297 + number for number, name in enumerate(("image", "video", "audio"))}
    config = transformers.EmbeddingGemma2Config(
        text_config=text.config, vision_config=vision, audio_config=audio, **marks
    )
    whole = transformers.EmbeddingGemma2Model(config).eval()
    whole.language_model.load_state_dict(text.state_dict())
    whole.save_pretrained(folder)
    add_modules(folder, "mean_tokens")
    pooling = {"pooling_mode": "mean", "embedding_dimension": 40, "include_prompt": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
    return folder, whole


def test_vectors_of_the_published_form(published: tuple[Path, Any]) -> None:
    folder, theirs = published
    with LLM(str(folder), **SMALL) as llm:
        assert (llm.numerics, llm.client.welcome.is_encoder) == ("L2", True)
        assert llm.client.welcome.tasks == {"embed": 40, "token_embed": 40}
        together = vectors(llm, PROMPTS)
        for ids, vector in zip(PROMPTS, together, strict=True):
            np.testing.assert_allclose(vector, unit(states(theirs, ids).mean(0)), atol=1e-5)
            assert vectors(llm, [ids])[0].tobytes() == vector.tobytes()
        (short,) = vectors(llm, PROMPTS[2:3], dimensions=8)
        np.testing.assert_allclose(short, unit(states(theirs, PROMPTS[2]).mean(0)[:8]), atol=1e-5)
        (each,) = vectors(llm, PROMPTS[1:2], "token_embed", use_activation=False)
        np.testing.assert_allclose(each, states(theirs, PROMPTS[1]), atol=1e-4)
        with pytest.raises(InvalidRequestError, match="513"):
            vectors(llm, [[5] * 513])


def test_an_adapter_is_as_if_merged(published: tuple[Path, Any], tmp_path: Path) -> None:
    """On all linear layers of attention and MLPs, by the names of the whole model."""
    folder, theirs = published
    merged, pairs, rng = copy.deepcopy(theirs), {}, np.random.default_rng(3)
    for name, layer in merged.language_model.named_modules():
        if isinstance(layer, torch.nn.Linear) and "_proj" in name and "ple" not in name and "layers" in name:
            a, b = (
                rng.standard_normal(shape, np.float32) for shape in ((4, layer.in_features), (layer.out_features, 4))
            )
            pairs[f"language_model.{name}"] = a * np.float32(0.1), b * np.float32(0.1)
            layer.weight.data += 2 * torch.from_numpy(pairs[f"language_model.{name}"][1] @ (a * np.float32(0.1)))
    adapter = write_peft(tmp_path, pairs, rank=4, alpha=8.0)
    with LLM(str(folder), **SMALL, enable_lora=True, lora_modules={"a": str(adapter)}) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[:3]]
        requests = [None, LoRARequest("a", 1), LoRARequest("a", 1)]
        found = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False, lora_request=requests)]
    for ids, vector, model in zip(PROMPTS, found, (theirs, merged, merged), strict=False):
        np.testing.assert_allclose(vector, unit(states(model, ids).mean(0)), atol=1e-5)
    assert abs(np.array(found[1]) - unit(states(theirs, PROMPTS[1]).mean(0))).max() > 1e-3


def test_in_bfloat16(tmp_path: Path) -> None:
    """The states before the projection, which ours multiplies after the pooling."""
    theirs = build("as published").bfloat16()
    theirs.save_pretrained(tmp_path)
    theirs.embedding_projection = torch.nn.Identity()
    ours, single = load(tmp_path, BFLOAT16), np.concatenate([states(theirs, ids) for ids in PROMPTS])
    theirs.double()
    exact, found = np.concatenate([states(theirs, ids) for ids in PROMPTS]), hidden(ours, PROMPTS)
    check_errors(abs(np.concatenate(found) - exact), abs(single - exact))
    for ids, one in zip(PROMPTS, found, strict=True):
        assert hidden(ours, [ids])[0].tobytes() == one.tobytes()


def saved(folder: Path, **changed: Any) -> None:
    """Save a config.json with other settings, of which None leaves one out."""
    build("as published").config.save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


def test_what_config_json_says(tmp_path: Path) -> None:
    saved(tmp_path)
    expected = read_model_config(tmp_path)
    assert (expected.sees_all, expected.has_head, expected.embedding_size) == (True, False, 40)
    assert (expected.sliding_window, expected.sliding_layers, expected.num_caches) == (21, (0, 2), 2)
    assert (expected.full_heads, expected.per_layer) == (HeadSizes(1, 32), PerLayerParts(width=24, vocab_size=0))
    saved(tmp_path, architectures=["EmbeddingGemma2TextModel"])
    assert read_model_config(tmp_path) == expected
    names = ("per_layer_config", "layer_types", "rope_parameters", "embedding_dim", "hidden_size_per_layer_input")
    saved(tmp_path, **dict.fromkeys(names), num_hidden_layers=7, head_dim=16)
    least = read_model_config(tmp_path)
    assert (least.full_heads, least.sliding_layers) == (HeadSizes(1, 512), (0, 1, 2, 3, 4))
    assert (least.rope_theta, least.sliding_rope_theta, least.embedding_size) == (1e6, 1e4, 768)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"per_layer_config": {"0": {"head_dim": 32}}}, UnsupportedModelError, "only heads of layers without a window"),
        (
            {"per_layer_config": {"1": {"sliding_window": 3}}},
            UnsupportedModelError,
            "sliding_window=3 is not supported",
        ),
        ({"hidden_activation": "silu"}, UnsupportedModelError, "only 'gelu_pytorch_tanh' is"),
        ({"num_kv_shared_layers": 2}, UnsupportedModelError, "num_kv_shared_layers=2 is not supported; only 0 is"),
        ({"attention_k_eq_v": True}, UnsupportedModelError, "attention_k_eq_v=True is not supported; only false is"),
        ({"final_logit_softcapping": 3.0}, UnsupportedModelError, "final_logit_softcapping=3.0 is not supported"),
        ({"hidden_size_per_layer_input": 0}, ModelFileError, "hidden_size_per_layer_input must be an integer from 1"),
        ({"embedding_dim": 0}, ModelFileError, "embedding_dim must be an integer from 1"),
        (
            {"architectures": ["Gemma3ForCausalLM"]},
            UnsupportedModelError,
            "architectures=.*of model_type embedding_gemma2_text only 'EmbeddingGemma2TextModel' is",
        ),
        ({"architectures": ["Gemma3TextForSequenceClassification"]}, UnsupportedModelError, "architectures="),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    saved(tmp_path, **changed)
    with pytest.raises(error, match=message):
        read_model_config(tmp_path)


def test_pooling_without_files_and_one_that_is_refused(tmp_path: Path) -> None:
    build("as published").save_pretrained(tmp_path)
    assert read_model_config(tmp_path).max_position_embeddings > 77
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77}))
    assert read_model_config(tmp_path).max_position_embeddings == 77
    ours = load(tmp_path)
    pooler = read_pooler(EngineConfig(), tmp_path, ours, ours.config)
    assert (pooler.method, pooler.normalises, pooler.is_whole, len(pooler.layers)) == ("mean", True, True, 1)
    add_modules(tmp_path, "max_tokens")
    with pytest.raises(UnsupportedModelError, match="pooling 'max' is not supported for a model that projects"):
        read_pooler(EngineConfig(), tmp_path, ours, ours.config)
