"""Rotary scalings from config.json: how models extend their rotary embedding to longer contexts.

"dynamic" depends on the length of a request, but scales nothing up to max_position_embeddings, the upper limit of
max_model_len. "longrope" also depends on it, and its choice can be fixed: see LongropeScaling. Other types are refused
by name.
"""

import math

from core.model_files.settings.values import Values
from core.models.layers.rope_scaling import LinearScaling, Llama3Scaling, LongropeScaling, RopeScaling, YarnScaling

_MAX_FACTOR = 1e6
_MAX_LENGTH = 2**24  # tokens; also the limit of max_position_embeddings


def read_rope_scaling(
    group: Values, max_position_embeddings: int, num_divisors: int | None = None
) -> RopeScaling | None:
    """Return the scaling in config.json's rope_scaling or rope_parameters, or None for the default type.

    max_position_embeddings: tokens; the default of the original length. num_divisors: of longrope; None = the
    architecture has no such scaling. Errors: UnsupportedModelError naming the type; ModelFileError naming a missing or
    invalid number.
    """
    name = "rope_type" if "rope_type" in group.values else "type"
    kind = group.values.get(name, "default")
    if num_divisors is not None and kind in ("longrope", "su"):
        return _longrope(group, max_position_embeddings, num_divisors)
    if kind not in ("default", "dynamic", "linear", "llama3", "yarn"):
        group.refuse(name, "the types 'default', 'dynamic', 'linear', 'llama3' and 'yarn' are")
    if kind == "linear":
        return LinearScaling(_factor(group))
    if kind == "llama3":
        return _llama3(group, max_position_embeddings)
    return _yarn(group, max_position_embeddings) if kind == "yarn" else None


def longrope_attention_factor(factor: float, original_length: float) -> float:
    """Return the attention factor recommended by LongRoPE for a context extended by `factor`."""
    if factor <= 1 or original_length <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_length))


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return the attention factor recommended by the YaRN paper for a context extended by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factor(group: Values, default: float | None = None) -> float:
    return group.number("factor", 1 / _MAX_FACTOR, _MAX_FACTOR, default)


def _original_length(group: Values, max_position_embeddings: int) -> float:
    return group.number("original_max_position_embeddings", 1, _MAX_LENGTH, max_position_embeddings)


def _llama3(group: Values, max_position_embeddings: int) -> Llama3Scaling:
    low = group.number("low_freq_factor", 1 / _MAX_FACTOR, _MAX_FACTOR)
    high = group.number("high_freq_factor", 1 / _MAX_FACTOR, _MAX_FACTOR)
    if high < low:
        group.fail("high_freq_factor", f"must be at least low_freq_factor={low:g}, got {high:g}")
    return Llama3Scaling(_factor(group), low, high, _original_length(group, max_position_embeddings))


def _longrope(group: Values, max_position_embeddings: int, count: int) -> LongropeScaling:
    def divisors(name: str) -> tuple[float, ...]:
        numbers = group.get(name)
        if not isinstance(numbers, list) or len(numbers) != count:
            group.fail(name, f"must be a list of {count} numbers, got {numbers!r:.80}")
        if any(type(number) not in (int, float) or not 0 < number <= _MAX_FACTOR for number in numbers):
            group.fail(name, f"must hold numbers above 0, got {numbers!r:.80}")
        return tuple(map(float, numbers))

    original = _original_length(group, max_position_embeddings)
    factor = _factor(group, max(max_position_embeddings / original, 1 / _MAX_FACTOR))
    recommended = longrope_attention_factor(factor, original)
    return LongropeScaling(
        divisors("short_factor"),
        divisors("long_factor"),
        original,
        group.number("attention_factor", 1 / _MAX_FACTOR, _MAX_FACTOR, recommended),
    )


def _yarn(group: Values, max_position_embeddings: int) -> YarnScaling:
    original = _original_length(group, max_position_embeddings)
    factor = _factor(group, max_position_embeddings / original)
    scales = [group.number(name, 0.0, _MAX_FACTOR, 0.0) for name in ("mscale", "mscale_all_dim")]
    recommended = yarn_attention_factor(factor)
    if all(scales):
        recommended = yarn_attention_factor(factor, scales[0]) / yarn_attention_factor(factor, scales[1])
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=group.number("attention_factor", 1 / _MAX_FACTOR, _MAX_FACTOR, recommended),
        # transformers treats 0 as "not set"
        beta_fast=group.number("beta_fast", 0.0, _MAX_FACTOR, 32.0) or 32.0,
        beta_slow=group.number("beta_slow", 0.0, _MAX_FACTOR, 1.0) or 1.0,
        truncate=group.boolean("truncate", True),
    )
