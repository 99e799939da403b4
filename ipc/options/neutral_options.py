"""Options of vLLM's LLM(), of this and of earlier versions, that are not ours: each has no effect here, or is refused.

None always has no effect. Values that ask for a feature that does not exist are refused by name. docs/vllm.md describes
this for users.
"""

import json

from ipc.errors import ConfigError

#: Tuning of parts that this engine does not have, and reporting: any value is accepted and changes nothing.
WITHOUT_EFFECT = frozenset(
    [
        "aggregate_engine_logging",
        "all2all_backend",
        "allow_deprecated_quantization",
        "api_server_count",
        "async_engine_args",
        "collect_detailed_traces",
        "cp_kv_cache_interleave_size",
        "cuda_graph_sizes",
        "cudagraph_capture_sizes",
        "cudagraph_metrics",
        "data_parallel_address",
        "data_parallel_backend",
        "data_parallel_rpc_port",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "dcp_kv_cache_interleave_size",
        "disable_async_output_proc",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "disable_log_requests",
        "disable_log_stats",
        "disable_mm_preprocessor_cache",
        "disable_nccl_for_dp_synchronization",
        "enable_layerwise_nvtx_tracing",
        "enable_log_requests",
        "enable_logging_iteration_details",
        "enable_mfu_metrics",
        "eplb_config",
        "eplb_log_balancedness",
        "eplb_step_interval",
        "eplb_window_size",
        "expert_placement_strategy",
        "fully_sharded_loras",
        "guided_decoding_backend",
        "guided_decoding_disable_fallback",
        "interleave_mm_strings",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "kv_sharing_fast_prefill",
        "long_lora_scaling_factors",
        "lora_dtype",
        "lora_extra_vocab_size",
        "max_cpu_loras",
        "max_cudagraph_capture_size",
        "max_log_len",
        "max_long_partial_prefills",
        "max_parallel_loading_workers",
        "max_prompt_adapter_token",
        "max_prompt_adapters",
        "max_seq_len_to_capture",
        "media_io_kwargs",
        "mm_encoder_attn_backend",
        "mm_encoder_tp_mode",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "num_lookahead_slots",
        "optimization_level",
        "performance_mode",
        "prefix_caching_hash_algo",
        "profiler_config",
        "pt_load_map_location",
        "ray_workers_use_nsight",
        "safetensors_load_strategy",
        "show_hidden_metrics_for_version",
        "skip_mm_profiling",
        "tokenizer_pool_extra_config",
        "tokenizer_pool_size",
        "tokenizer_pool_type",
        "trust_remote_code",
        "ubatch_size",
        "use_async_output_proc",
        "use_tqdm_on_load",
        "use_v2_block_manager",
        "video_pruning_rate",
    ]
)
#: Those of them that are flags without a value on vLLM's command line.
SWITCHES = frozenset(
    [
        "aggregate_engine_logging",
        "allow_deprecated_quantization",
        "cudagraph_metrics",
        "disable_async_output_proc",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "disable_log_requests",
        "disable_log_stats",
        "disable_mm_preprocessor_cache",
        "disable_nccl_for_dp_synchronization",
        "enable_layerwise_nvtx_tracing",
        "enable_log_requests",
        "enable_logging_iteration_details",
        "enable_mfu_metrics",
        "eplb_log_balancedness",
        "fully_sharded_loras",
        "guided_decoding_disable_fallback",
        "interleave_mm_strings",
        "kv_cache_metrics",
        "kv_sharing_fast_prefill",
        "ray_workers_use_nsight",
        "skip_mm_profiling",
        "trust_remote_code",
        "use_async_output_proc",
        "use_tqdm_on_load",
        "use_v2_block_manager",
    ]
)
#: Features: the values that do not request them.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "additional_config": ({},),
    "allowed_local_media_path": ("",),
    "allowed_media_domains": ([],),
    "attention_backend": ("auto",),
    "attention_config": ({},),
    "calculate_kv_scales": (False,),
    "code_revision": (),
    "compilation_config": ({}, 0, 1, 2, 3),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_external_lb": (False,),
    "data_parallel_hybrid_lb": (False,),
    "data_parallel_rank": (0,),
    "data_parallel_size": (1,),
    "data_parallel_size_local": (1,),
    "data_parallel_start_rank": (0,),
    "decode_context_parallel_size": (1,),
    "default_mm_loras": ({},),
    "disable_chunked_mm_input": (False,),
    "disable_sliding_window": (False,),
    "download_dir": (),
    "ec_transfer_config": (),
    "enable_dbo": (False,),
    "enable_eplb": (False,),
    "enable_expert_parallel": (False,),
    "enable_mm_embeds": (False,),
    "enable_prompt_adapter": (False,),
    "enable_prompt_embeds": (True, False),
    "enable_reasoning": (False,),
    "enable_sleep_mode": (True, False),
    "enable_tower_connector_lora": (False,),
    "engine_use_ray": (False,),
    "guided_decoding_disable_additional_properties": (False,),
    "guided_decoding_disable_any_whitespace": (False,),
    "hf_config_path": (),
    "hf_overrides": ({},),
    "hf_token": (),
    "ignore_patterns": ([], "original/**/*", ["original/**/*"]),
    "io_processor_plugin": (),
    "kv_events_config": (),
    "kv_offloading_backend": ("native",),
    "logits_processor_pattern": (),
    "logits_processors": ([],),
    "mamba_block_size": (),
    "mamba_cache_dtype": ("auto",),
    "mamba_cache_mode": ("none",),
    "mamba_ssm_cache_dtype": ("auto",),
    "mm_encoder_only": (False,),
    "mm_processor_kwargs": ({},),
    "model_loader_extra_config": ({},),
    "model_weights": ("",),
    "multi_step_stream_outputs": (True, False),
    "ngram_prompt_lookup_max": (),
    "ngram_prompt_lookup_min": (),
    "master_port": (29_501,),
    "node_rank": (0,),
    "num_redundant_experts": (0,),
    "num_scheduler_steps": (1,),
    "num_speculative_tokens": (),
    "otlp_traces_endpoint": (),
    "override_attention_dtype": (),
    "override_neuron_config": ({},),
    "override_pooler_config": (),
    "pooler_config": (),
    "prefill_context_parallel_size": (1,),
    "qlora_adapter_name_or_path": (),
    "reasoning_parser": ("",),
    "reasoning_parser_plugin": ("",),
    "rope_scaling": ({},),
    "rope_theta": (),
    "served_model_name": (),
    "speculative_model": (),
    "sliding_window": (),
    "stream_interval": (1,),
    "structured_outputs_config": ({},),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": ("main",),
    "tokens_only": (False,),
    "weight_transfer_config": (),
    "worker_cls": ("auto",),
    "worker_extension_cls": ("",),
}
#: An image is encoded before its request is scheduled.
_BY_RAY = "distributed_executor_backend='ray' lets Ray place an engine's ranks; engine-core ray places whole engines"
#: What to do instead.
_INSTEAD = {
    "data_parallel_size": "start several engines",
    "download_dir": "set the cache's folder with the environment variable HF_HOME",
    "engine_use_ray": _BY_RAY,
    "hf_token": "set the environment variable HF_TOKEN",
    "logits_processors": "logit_bias, bad_words and structured outputs edit logits (docs/vllm.md)",
    "master_port": "write it to master_addr, as HOST:PORT",
    "num_scheduler_steps": "async_scheduling computes a step while the next one is scheduled",
    "otlp_traces_endpoint": "engine-core serve --http --otlp-traces-endpoint sends spans",
    "served_model_name": "use engine-core http --served-model-name",
    "sliding_window": "it is kv_window",
    "speculative_model": "use speculative_config",
}
_A_REQUESTS = "it is an argument of generate() and add_request()"
_A_PROMPTS = "it is a key of a prompt: {'prompt_token_ids': ..., 'cache_salt': ...}"
_NO_OBJECT = "there are no config objects; each of its fields is an option"
_BY_DEVICE = "device='cpu', device='cuda' or an installed executor's device chooses it (docs/executors.md)"
#: Names that are no options, neither here nor of LLM() in vLLM, and what has their meaning.
ELSEWHERE = {
    **dict.fromkeys(("sampling_params", "pooling_params", "lora_request", "priority", "use_tqdm"), _A_REQUESTS),
    **dict.fromkeys(("cache_salt", "prompt_embeds", "prompt_token_ids", "multi_modal_data"), _A_PROMPTS),
    **dict.fromkeys(
        ("vllm_config", "scheduler_config", "cache_config", "kv_cache_config", "lora_config", "model_config"),
        _NO_OBJECT,
    ),
    **dict.fromkeys(("cpu_executor", "gpu_executor"), _BY_DEVICE),
    **dict.fromkeys(("token_budget", "num_batched_tokens", "max_num_scheduled_tokens"), "it is max_num_batched_tokens"),
    **dict.fromkeys(("block_manager", "kv_cache_manager"), "there is one: a pool of KV blocks"),
    "ray_gpu_executor": _BY_RAY,
    "arrival_time": "a request arrives when the engine receives it",
    "enable_caching": "it is enable_prefix_caching",
    "enable_chunking": "it is enable_chunked_prefill",
    "eos_token_id": "it is read from the model's files",
    "is_attention_free": "it is read from the model's files",
    "log_stats": "engine-core top and engine-core serve --metrics show statistics",
    "lora_enabled": "it is enable_lora",
    "max_chunk_size": "it is long_prefill_token_threshold",
    "output_proc_callback": "async_scheduling computes a step while the next one is scheduled",
    "prompt_limit": "it is max_model_len",
    "user_specified_preemption_mode": "it is preemption_mode",
    "watermark_blocks": "watermark is their share of all blocks",
    "world_size": "it is tensor_parallel_size times pipeline_parallel_size",
}


def is_neutral(name: str) -> bool:
    """Return whether vLLM has an option of this name that is not ours."""
    return name in NEUTRAL or name in WITHOUT_EFFECT


def is_switch(name: str) -> bool:
    """Return whether this option is a flag without a value on vLLM's command line."""
    values = NEUTRAL.get(name, ())
    return name in SWITCHES or (bool(values) and all(isinstance(value, bool) for value in values))


def value_of(text: str) -> object:
    """Return the value of such an option's flag as LLM() would get it: a number, an object or a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_neutral(name: str, value: object) -> None:
    """Check the value of such an option.

    Errors: ConfigError for a value that asks for a feature that does not exist.
    """
    if name in WITHOUT_EFFECT or value is None or any(_is_same(value, allowed) for allowed in NEUTRAL[name]):
        return
    allowed = " or ".join(repr(choice) for choice in (*NEUTRAL[name], None))
    instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise ConfigError(f"{name}={value!r:.80} is not supported by this version; only {allowed} is{instead}")


def _is_same(value: object, allowed: object) -> bool:
    """Return whether these are equal; True is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed
