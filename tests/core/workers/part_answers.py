"""The answers of a group of workers to some requests, whoever is killed meanwhile, and the model that they compute."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from core.adapters.adapter import AdapterWeights
from core.engine import EngineCore
from core.executors.by_name import load_executor
from core.inputs import EngineInput
from core.process.resolve import resolve, resolve_costs
from core.workers.executor import WorkersExecutor
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "vocab_size": 500,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
#: Qwen 3.5: layers with recurrent states and gates of attention's output.
HYBRID = {
    **MODEL,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 24,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
#: LFM2, and Granite 4 H, whose heads have one norm in common.
CONVOLUTIONS = {
    **MODEL,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
STATE_SPACE = {
    **MODEL,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 160,
}
#: Qwen 3.5 with experts, and a layer for multi-token prediction.
ROUTED = {
    **HYBRID,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 80,
    "shared_expert_intermediate_size": 48,
    "mtp_num_hidden_layers": 1,
}
#: DeepSeek V3: latent attention, a dense first layer, groups of experts, and a layer for multi-token prediction.
LATENT = {
    **MODEL,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 72,
    "routed_scaling_factor": 2.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
GEMMA = {
    **MODEL,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "rope_local_base_freq": 1000.0,
}
#: Gemma 3n: hidden states in streams, sparse gates, layers that share K and V, inputs of single layers.
STREAMS = {
    **GEMMA,
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 490,
    "laurel_rank": 16,
    "altup_num_inputs": 3,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
    "final_logit_softcapping": 3.0,
}
#: Gemma 4 26B: heads of two sizes, V that is K, experts alongside dense MLPs.
BESIDE = {
    **GEMMA,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 80,
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "threads": 1,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 11,  # too few for all: some are preempted, and copied to the host
    "max_num_batched_tokens": 48,
    "max_model_len": 128,
    "preemption_mode": "swap",
    "num_swap_blocks": 40,
    "generation_config": "vllm",
}


def requests(count: int = 6, max_tokens: int = 30) -> list[AddRequest]:
    rng, found = np.random.default_rng(5), []
    for number in range(count):
        options: dict[str, Any] = {"temperature": 0.9, "top_k": 50} if number % 2 else {"temperature": 0.0}
        if number == 2:
            options |= {"logprobs": 3, "prompt_logprobs": 2}
        if number == 3:
            options |= {"n": 2, "logprobs": 1, "repetition_penalty": 1.3}
        if number == 4:
            options |= {"logit_bias": {7: 3.0}}
        prompt = np.tile(rng.integers(3, 400, 11), 5)[: 20 + 6 * number]  # with repetitions, for drafts
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
        found.append(AddRequest(number, prompt.astype("<i4").tobytes(), params, seed=number))
    return found


def answers(
    config: EngineConfig,
    disturb: dict[int, Callable[[WorkersExecutor], None]] | None = None,
    least_accepted: int = 0,
    least_drafts: int = 0,
    sent: list[AddRequest] | None = None,
    adapters: Sequence[AdapterWeights] = (),
) -> list[Any]:
    """Return all that comes for the requests, by request: tokens, log probabilities, ends.

    least_accepted: so many drafts are right, at least. least_drafts: so many are made, at least. sent: None = all of
    requests(). adapters: those that they name.
    """
    executor = load_executor(config)
    for weights in adapters:
        assert executor.adapters is not None
        executor.adapters.put(weights)
    news: list[tuple[int, EngineInput]] = []
    if isinstance(executor, WorkersExecutor):
        executor.follow(lambda one: news.append((0, one)))
    try:
        sizes = {"total_memory_bytes": 1 << 30, "num_cpus": 1}
        resolved = resolve(config, executor.info, executor.determine_num_available_blocks, **sizes)
        executor.initialize_cache(resolved)
        resolved = resolve_costs(resolved, config, executor.measure_costs, executor.measure_steps)
        executor.warm_up()
        engine = EngineCore(resolved, executor)
        inbox: list[tuple[int, EngineInput]] = [(0, message) for message in sent or requests()]
        tokens: dict[tuple[int, int], list[int]] = {}
        values: dict[tuple[int, int, int], bytes] = {}
        num_steps, end = 0, time.monotonic() + 300
        while inbox or engine.has_unfinished:
            assert time.monotonic() < end, "the requests do not end"
            inbox, taken = [*inbox, *news], len(news)
            del news[:taken]
            if engine.has_work:
                num_steps += 1
                if disturb and num_steps in disturb:
                    disturb[num_steps](executor)  # type: ignore[arg-type]
            for _, reply in engine.step(inbox, time.monotonic_ns()):
                assert isinstance(reply, Outputs), reply
                _take(reply, tokens, values)
            inbox = []
            if not engine.has_work:
                time.sleep(0.002)
        stats = engine.scheduler.stats
        assert stats.num_swapped_out_blocks > 0
        assert stats.num_accepted_tokens >= least_accepted, (stats.num_draft_tokens, stats.num_accepted_tokens)
        assert stats.num_draft_tokens >= least_drafts, stats.num_draft_tokens
        return [executor.info.fingerprint, sorted(tokens.items()), sorted(values.items())]
    finally:
        executor.close()


def _take(reply: Outputs, tokens: dict[tuple[int, int], list[int]], values: dict[tuple[int, int, int], bytes]) -> None:
    numbers = np.frombuffer(reply.numbers, "<u4").tolist()
    choices = np.frombuffer(reply.choices, "<u2").tolist() if reply.choices else [0] * len(numbers)
    ids, first = np.frombuffer(reply.tokens, "<i4").tolist(), 0
    for number, choice, count in zip(numbers, choices, np.frombuffer(reply.counts, "<u2").tolist(), strict=True):
        tokens.setdefault((number, choice), []).extend(ids[first : first + count])
        first += count
    if (columns := reply.logprobs) is not None:
        first = 0
        packed = [np.frombuffer(each, "<u4").tolist() for each in (columns.numbers, columns.positions, columns.counts)]
        own = np.frombuffer(columns.choices, "<u2").tolist() if columns.choices else [0] * len(packed[0])
        for number, position, count, choice in zip(*packed, own, strict=True):
            values[number, choice, position] = columns.values[4 * first : 4 * (first + count)]
            first += count


def config_of(folder: str, size: int, **options: Any) -> EngineConfig:
    return config_from_options(model=folder, **{**OPTIONS, "tensor_parallel_size": size, **options})


def kill(worker: int, number: int = signal.SIGKILL) -> Callable[[WorkersExecutor], None]:
    return lambda executor: os.kill(executor.pids[worker], number)
