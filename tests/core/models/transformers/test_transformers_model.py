"""The generic path: models whose code is transformers', on this engine's scheduler and KV cache."""

import copy
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from core.engine import EngineCore
from core.executors.local import LocalExecutor
from core.process.resolve import resolve
from frontend.client.received_logprobs import ReceivedLogprobs, logprob_columns_of
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.model_options import Dtype
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

VOCAB = 300
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, length).tolist() for n, length in enumerate((1, 9, 40, 150))]


#: What most configs call their sizes.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": VOCAB, "n_positions": 256}
#: Since transformers 5.24 these use its attention interface; before that they are refused.
GPTJ_RUNS = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24)
#: model_type -> its other settings.
CONFIGS: dict[str, dict[str, Any]] = {
    "olmo2": {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0},
    "gpt_neox": SIZES,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 256, "eos_token_id": 2},
    "mixtral": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4},
    "bitnet": {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0},
    "opt": {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi3": {**SIZES, "num_key_value_heads": 2, "sliding_window": 4, "pad_token_id": 0},
    "deepseek_v2": {
        **SIZES,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    **({"gptj": GPT, "codegen": GPT} if GPTJ_RUNS else {}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save(model_type: str, folder: Path, **changes: Any) -> Any:
    """A random checkpoint of this config in the folder; returns transformers' own model, eager, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **CONFIGS.get(model_type, SIZES) | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
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
    options = {"dtype": "float32", "threads": 1, "kv_cache_memory_bytes": 4 << 20} | options
    options = {"model_impl": "transformers"} | options
    return EngineConfig(model=str(folder), **options)


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: ReceivedLogprobs


def answers(config: EngineConfig, prompts: list[list[int]], count: int, **options: Any) -> list[Answer]:
    executor = LocalExecutor(config)
    config = resolve(
        config, executor.info, executor.determine_num_available_blocks, total_memory_bytes=1 << 30, num_cpus=1
    )
    executor.initialize_cache(config)
    engine = EngineCore(config, executor)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)
    inbox = [(0, AddRequest(i, np.array(ids, "<i4").tobytes(), params, seed=i)) for i, ids in enumerate(prompts)]
    found = [Answer([], ReceivedLogprobs(len(prompt))) for prompt in prompts]
    while inbox or engine.has_work:
        for _, message in engine.step(inbox, 0):
            assert isinstance(message, Outputs), message
            numbers, values = np.frombuffer(message.numbers, "<u4"), np.frombuffer(message.tokens, "<i4")
            for number, token in zip(numbers.tolist(), values.tolist(), strict=True):
                found[number].tokens.append(token)
            if message.logprobs is not None:
                for number, _, position, logprobs in logprob_columns_of(message.logprobs).split():
                    found[number].logprobs.add(position, logprobs)
        inbox = []
    return found


def generate(config: EngineConfig, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [answer.tokens for answer in answers(config, prompts, count)]


@pytest.mark.parametrize("model_type", CONFIGS)
def test_greedy_tokens_equal_transformers(model_type: str, tmp_path: Path) -> None:
    model = save(model_type, tmp_path)
    expected = [greedy(model, prompt, 16) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "the checkpoint tells prompts not apart"
    assert generate(config_for(tmp_path, max_num_batched_tokens=64), PROMPTS, 16) == expected
    # All over again by recomputation: a pool that two of the requests fill.
    squeezed = config_for(tmp_path, max_num_batched_tokens=37, num_blocks_override=13, max_model_len=190)
    assert generate(squeezed, PROMPTS, 16) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["gpt2", "phi3"])
def test_logprobs_equal_transformers(model_type: str, dtype: Dtype, tmp_path: Path) -> None:
    """The log probabilities are those of prompt and output, chunked; phi3 has a window of 4 tokens. The bound is:
    twice what its bfloat16 model is off, or float32's rounding."""
    exact = save(model_type, tmp_path)
    config = config_for(tmp_path, max_num_batched_tokens=64, dtype=dtype)
    rounded = copy.deepcopy(exact).to(getattr(torch, dtype))
    for prompt, (tokens, got) in zip(PROMPTS, answers(config, PROMPTS, 8, logprobs=5, prompt_logprobs=2), strict=True):
        whole = prompt + tokens
        with torch.inference_mode():
            expected, theirs = (
                model(torch.tensor([whole]), use_cache=False).logits[0].float().log_softmax(-1).numpy()
                for model in (exact, rounded)
            )
        bound = 1e-4 + 2 * float(np.abs(theirs - expected).max())
        assert bound < (1e-3 if dtype == "float32" else 1.0)
        assert [len(one.token_ids) for one in got.prompt + got.output] == [3] * (len(prompt) - 1) + [6] * 8
        for position, one in enumerate(got.prompt + got.output, 1):
            row = expected[position - 1]
            assert one.token_ids[0] == whole[position]
            assert np.abs(one.values - row[one.token_ids]).max() < bound
            others = np.sort(row)[::-1][: len(one.token_ids) - 1]
            assert np.abs(one.values[1:] - others).max() < bound


def test_without_its_window_phi3_is_another_model(tmp_path: Path) -> None:
    """The golden above would notice: the window changes what follows."""
    save("phi3", tmp_path / "with")
    save("phi3", tmp_path / "without", sliding_window=None)
    narrow, wide = (generate(config_for(tmp_path / name), PROMPTS[1:], 8) for name in ("with", "without"))
    assert all(one != other for one, other in zip(narrow, wide, strict=True))


def test_made_up_weights_need_a_config_only(tmp_path: Path) -> None:
    save("olmo2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    before = torch.random.get_rng_state()
    first, second = (generate(config_for(tmp_path, load_format="dummy"), PROMPTS[:2], 6) for _ in range(2))
    assert first == second
    assert torch.equal(torch.random.get_rng_state(), before)
    info = LocalExecutor(config_for(tmp_path, load_format="dummy")).info
    assert (info.vocab_size, info.eos_token_ids, info.fingerprint[:6]) == (VOCAB, (2,), "dummy-")
    with pytest.raises(ConfigError, match="load_format='gguf' does not support"):
        LocalExecutor(config_for(tmp_path, load_format="gguf"))


def test_it_is_announced_as_l0_with_its_own_fingerprint(tmp_path: Path) -> None:
    save("olmo2", tmp_path)
    info = LocalExecutor(config_for(tmp_path)).info
    assert info.numerics == "L0"
    assert info.eos_token_ids == (2,)
    assert (info.vocab_size, info.max_model_len) == (VOCAB, 256)
