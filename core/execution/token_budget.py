"""token_budget: the number of tokens of a step, as given or by default."""

from ipc.config import EngineConfig
from ipc.errors import ConfigError

DEFAULT_TOKEN_BUDGET = 512  # tokens of a step


def token_budget(config: EngineConfig, max_model_len: int) -> int:
    """Return max_num_batched_tokens as given, or its default: without chunked prefill at least max_model_len tokens.

    Errors: ConfigError when the given budget is too small for a whole prompt of max_model_len tokens.
    """
    given = config.max_num_batched_tokens
    if config.enable_chunked_prefill:
        return given or DEFAULT_TOKEN_BUDGET
    if given is not None and given < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={given} is less than max_model_len={max_model_len}, and with "
            "enable_chunked_prefill=false a whole prompt must fit one step: leave max_num_batched_tokens out, set it "
            f"to at least {max_model_len}, or set max_model_len to at most {given}"
        )
    return given or max(DEFAULT_TOKEN_BUDGET, max_model_len)
