"""Options of vLLM's LLM() without an effect here: accepted only at values that change nothing."""

from ipc.errors import ConfigError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "trust_remote_code": (True, False),  # no remote code is ever run
    "quantization": (None,),
    "disable_log_stats": (True, False),
    "tokenizer_mode": ("auto",),
    "revision": (None,),
    "kv_cache_dtype": ("auto",),
    "distributed_executor_backend": (None, "uni", "mp"),
    "enable_lora": (False,),
    "cpu_offload_gb": (0,),
    "disable_custom_all_reduce": (True, False),
    "hf_token": (None,),
    "served_model_name": (None,),
    "attention_backend": (None, "auto"),
}
#: Neutral ranges of number options: (above, up to).
NEUTRAL_NUMBERS: dict[str, tuple[float, float]] = {
    "max_seq_len_to_capture": (0, 2**24),
}


def is_neutral(name: str) -> bool:
    """Return whether vLLM has an option of this name that has no effect here."""
    return name in NEUTRAL or name in NEUTRAL_NUMBERS


def check_neutral(name: str, value: object) -> None:
    """Check the value of a neutral option. Errors: ConfigError for a value that asks for an unsupported feature."""
    if name in NEUTRAL:
        if value not in NEUTRAL[name]:
            allowed = " or ".join(repr(choice) for choice in NEUTRAL[name])
            raise ConfigError(f"{name}={value!r} is not supported by this version; only {allowed} is")
        return
    low, high = NEUTRAL_NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise ConfigError(f"{name} must be a number above {low} and up to {high}; got {value!r}")
