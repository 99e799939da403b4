"""The generic path: models whose code is transformers', on this engine's scheduler and KV cache."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import EngineCore
from core.executor.local import LocalExecutor
from core.models import transformers_model
from core.resolve import resolve
from ipc.config import EngineConfig
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.messages import AddRequest, Outputs
from ipc.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

VOCAB = 300
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, length).tolist() for n, length in enumerate((1, 9, 40, 150))]


def olmo2() -> Any:
    from transformers import Olmo2Config

    return Olmo2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def gpt_neox() -> Any:
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )


def gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=256, bos_token_id=0, eos_token_id=0)


def mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save(make: Callable[[], Any], folder: Path) -> Any:
    """A random checkpoint of this config in the folder; returns transformers' own model, eager, float32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(make(), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # else all logits of a fresh model are nearly equal
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            token = model(ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat((ids, token.view(1, 1)), 1)
    return ids[0, len(prompt) :].tolist()


def config_for(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", threads=1, kv_cache_memory_bytes=4 << 20, **options)


def generate(config: EngineConfig, prompts: list[list[int]], count: int) -> list[list[int]]:
    executor = LocalExecutor(config)
    config = resolve(
        config, executor.info, executor.determine_num_available_blocks, total_memory_bytes=1 << 30, num_cpus=1
    )
    executor.initialize_cache(config)
    engine = EngineCore(config, executor)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    inbox = [(0, AddRequest(i, np.array(ids, "<i4").tobytes(), params, seed=i)) for i, ids in enumerate(prompts)]
    tokens: list[list[int]] = [[] for _ in prompts]
    while inbox or engine.has_work:
        for _, message in engine.step(inbox, 0):
            assert isinstance(message, Outputs), message
            numbers, values = np.frombuffer(message.numbers, "<u4"), np.frombuffer(message.tokens, "<i4")
            for number, token in zip(numbers.tolist(), values.tolist(), strict=True):
                tokens[number].append(token)
        inbox = []
    return tokens


@pytest.mark.parametrize("make", [olmo2, gpt_neox, gpt2, mixtral])
def test_greedy_tokens_equal_transformers(make: Callable[[], Any], tmp_path: Path) -> None:
    model = save(make, tmp_path)
    expected = [greedy(model, prompt, 16) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "the checkpoint tells prompts not apart"
    assert generate(config_for(tmp_path, max_num_batched_tokens=64), PROMPTS, 16) == expected
    # All over again by recomputation: a pool that two of the requests fill.
    squeezed = config_for(tmp_path, max_num_batched_tokens=37, num_blocks_override=13, max_model_len=190)
    assert generate(squeezed, PROMPTS, 16) == expected


def test_it_is_announced_as_l0_with_its_own_fingerprint(tmp_path: Path) -> None:
    save(olmo2, tmp_path)
    info = LocalExecutor(config_for(tmp_path)).info
    assert info.numerics == "L0"
    assert info.eos_token_ids == (2,)
    assert (info.vocab_size, info.max_model_len) == (VOCAB, 256)


def test_native_only_refuses_other_architectures(tmp_path: Path) -> None:
    save(gpt2, tmp_path)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        LocalExecutor(config_for(tmp_path, model_impl="native"))


def test_layers_without_attention_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCAB, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelFileError, match="Mamba"):
        LocalExecutor(config_for(tmp_path))


def test_a_missing_weight_file_is_a_model_file_error(tmp_path: Path) -> None:
    save(gpt2, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="safetensors"):
        LocalExecutor(config_for(tmp_path))


def test_transformers_missing_names_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelFileError, match=r"engine-core\[transformers\]"):
        transformers_model.TransformersModel(tmp_path, torch.float32)
