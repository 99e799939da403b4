"""token_budget: the number of tokens in a step, as configured or by default; encoder_sizes: those of images."""

from core.execution.executor import ModelInfo
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.step_sizes import SizedConfig, chosen_sizes

DEFAULT_ENCODER_CACHE_BYTES = 256 << 20  # 1,800 images of 64 tokens of 576 numbers


def token_budget(
    config: SizedConfig, max_model_len: int, max_whole_tokens: int = 0, *, device_bytes: int = 0, wanted: int = 0
) -> int:
    """Return the configured max_num_batched_tokens, or its default: at least max_model_len without chunked prefill.

    max_whole_tokens: see ModelInfo. A step must fit this many tokens plus one token of every other row. device_bytes:
    see chosen_sizes(). wanted: the default is at least this.
    Errors: ConfigError if the given budget is too small for a whole prompt of max_model_len tokens, or for
    max_whole_tokens; and if long_prefill_token_threshold is.
    """
    given, chosen = config.max_num_batched_tokens, chosen_sizes(device_bytes).num_tokens
    if config.enable_chunked_prefill:
        least = max_whole_tokens and max_whole_tokens + config.max_num_seqs - 1
        if given is not None and given < least:
            raise ConfigError(
                f"max_num_batched_tokens={given}: the {max_whole_tokens} tokens of an image are computed in one step, "
                f"plus one token of each other request (max_num_seqs={config.max_num_seqs}): set it to at least "
                f"{least}, or max_num_seqs to less"
            )
        if 0 < config.long_prefill_token_threshold < max_whole_tokens:
            raise ConfigError(
                f"long_prefill_token_threshold={config.long_prefill_token_threshold}: an image's {max_whole_tokens} "
                f"tokens are computed in one step: set it to at least {max_whole_tokens}"
            )
        return given or max(chosen, least, wanted)
    if given is not None and given < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={given} is less than max_model_len={max_model_len}, and with "
            "enable_chunked_prefill=false a whole prompt must fit one step: leave max_num_batched_tokens out, set it "
            f"to at least {max_model_len}, or set max_model_len to at most {given}"
        )
    return given or max(chosen, max_model_len, wanted)


def encoder_sizes(config: EngineConfig, info: ModelInfo, num_step_tokens: int) -> dict[str, int]:
    """Return max_num_encoder_input_tokens and encoder_cache_size, as configured or by default; 0 without images.

    By default a step encodes one image, because each one delays the tokens of all requests in the step. Without chunked
    prefill it must be able to encode all images of a prompt. num_step_tokens: max_num_batched_tokens.
    Errors: ConfigError if a given size is too small for what a step may need.
    """
    if not info.image_tokens:
        return {"max_num_encoder_input_tokens": 0, "encoder_cache_size": 0}
    least, why = info.image_tokens, f"an image of {info.name} has {info.image_tokens} tokens"
    if not config.enable_chunked_prefill and num_step_tokens > least:
        least, why = num_step_tokens, "with enable_chunked_prefill=false one step encodes all images of a prompt"
    default = max(least, DEFAULT_ENCODER_CACHE_BYTES // info.image_token_bytes)
    budget, cache_size = config.max_num_encoder_input_tokens, config.encoder_cache_size
    sizes = {
        "max_num_encoder_input_tokens": least if budget is None else budget,
        "encoder_cache_size": default if cache_size is None else cache_size,
    }
    for name, size in sizes.items():
        if size < least:
            raise ConfigError(f"{name}={size}: {why}: set it to at least {least}, or leave it out")
    return sizes
