"""SpeculativeConfig: the option speculative_config, with vLLM's keys; see docs/speculation.md."""

from typing import Any

import msgspec

from ipc.errors import ConfigError
from ipc.options.option import json_object

#: Most drafts of a row in one step.
MAX_DRAFTS = 32
_MAX_LOOKUP = 16
_DEFAULT_LOOKUP = (2, 5)
_MAX_DEPTH = 24
#: Drafts by default. A layer for multi-token prediction is trained for one, an assistant for several.
_DRAFTS = {"draft_model": 4, "eagle3": 4, "mtp": 1}
_DRAFTS_OF_ASSISTANT = 4
_MAX_CACHED_REQUESTS = 1 << 20

#: Layers for multi-token prediction, by vLLM's names: those that method mtp reads, and others.
_READ_LAYERS = (
    *("mimo_mtp", "qwen3_5_mtp", "qwen3_next_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "deepseek_mtp"),
    *("exaone_moe_mtp", "gemma4_mtp"),
)
_OTHER_LAYERS = (
    *("glm_ocr_mtp", "ernie_mtp", "nemotron_h_mtp", "longcat_flash_mtp", "step3p5_mtp", "pangu_ultra_moe_mtp"),
)
#: Methods of vLLM that this version does not have.
_OTHER_METHODS = (
    *("eagle", "medusa", "mlp_speculator", "ngram_gpu", "dflash", "extract_hidden_states", "custom_class"),
    *_OTHER_LAYERS,
    *_READ_LAYERS,
)
#: Methods in which a model in the executor makes the drafts.
_MODEL_METHODS = ("draft_model", "eagle3", "mtp")
_METHODS = ("ngram", "suffix", *_MODEL_METHODS)
#: Those of them that name a model.
_NAMING_METHODS = ("draft_model", "eagle3")
#: Parts of the names of models that draft -> the method of those with them.
_ASSISTANT = "assistant"
_NAMED = {"eagle3": "eagle3", _ASSISTANT: "mtp"}
_NO_LAYERS = "these layers are not read here; those that are have the name 'mtp'"
_NO_HEADS = "of heads that read the model's hidden states, only EAGLE-3's and MTP layers are supported"
#: Why some of these are not supported.
_REASONS = {
    **dict.fromkeys(_OTHER_LAYERS, _NO_LAYERS),
    **dict.fromkeys(_READ_LAYERS, "its name here is 'mtp'"),
    **dict.fromkeys(("eagle", "medusa", "mlp_speculator", "dflash"), _NO_HEADS),
}

#: Keys of vLLM without effect here, each with the values that describe what is done anyway.
_NEUTRAL_KEYS: dict[str, tuple[object, ...]] = {
    "draft_tensor_parallel_size": (1,),
    "enforce_eager": (True, False),  # no graphs are captured for drafts
    "disable_padded_drafter_batch": (True, False),  # no batch is padded
    "parallel_drafting": (False,),
    "use_heterogeneous_vocab": (False,),
    "rejection_sample_method": ("standard",),
}
#: Keys of vLLM without effect here -> why.
_REFUSED_KEYS = {
    "num_speculative_tokens_per_batch_size": "the number of drafts follows the measured cost of a step",
    "disable_by_batch_size": "the number of drafts follows the measured cost of a step, and a large batch gets none",
    "speculative_token_tree": "drafts are a chain",
    "suffix_decoding_min_token_prob": "the acceptance rate of drafts is measured, and the cost rule decides",
    "rejection_sample_method": "a draft is accepted if and only if sampling draws it",
    "posterior_threshold": "a draft is accepted if and only if sampling draws it",
    "posterior_alpha": "a draft is accepted if and only if sampling draws it",
    "draft_tensor_parallel_size": "one process computes the whole draft model",
    "enforce_eager": "it must be True or False",
    "draft_sample_method": "a draft is accepted if and only if sampling draws it",
    "disable_logprobs": "log probabilities are the same as without speculation",
    "disable_padded_drafter_batch": "no batch is padded",
    "use_heterogeneous_vocab": "a draft model must have the model's vocabulary",
    "revision": "write it after the name: model='org/name@revision'",
    "parallel_drafting": "methods that need it are not supported",
    "quantization": "the option quantization applies to both models",
}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drafted. No draft changes a token; right drafts save steps."""

    method: str
    model: str | None = None  # for methods that run a model: folder, .gguf file or Hugging Face name
    num_speculative_tokens: int = 7  # most drafts of a row in one step
    prompt_lookup_min: int = _DEFAULT_LOOKUP[0]  # least and most tokens that must match
    prompt_lookup_max: int = _DEFAULT_LOOKUP[1]
    suffix_decoding_max_tree_depth: int = _MAX_DEPTH  # most tokens of a match
    suffix_decoding_max_cached_requests: int = 10_000  # number of earlier outputs kept; 0: none
    suffix_decoding_max_spec_factor: float = 1.0  # most drafts for each token of a match
    #: Durations of steps of 1, 2, 4, 8, ... tokens with logits, in ns. Empty: measured at the engine's start.
    step_ns: tuple[int, ...] = ()
    draft_ns: int = 0  # duration of a model's drafts for one row; measured if step_ns is
    #: As step_ns, for steps that overlap with no other step, if others do. Empty: the same.
    alone_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            if self.method in _OTHER_METHODS:
                reason = f": {_REASONS[self.method]}" if self.method in _REASONS else ""
                raise ConfigError(f"speculative_config: method {self.method!r} is not supported{reason}; {_have()}")
            raise ConfigError(f"speculative_config: unknown method {self.method!r:.80}; {_have()}")
        _check("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFTS)
        _check("prompt_lookup_min", self.prompt_lookup_min, _MAX_LOOKUP)
        _check("prompt_lookup_max", self.prompt_lookup_max, _MAX_LOOKUP)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min} is more than "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        _check("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, _MAX_DEPTH)
        _check("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, _MAX_CACHED_REQUESTS, 0)
        factor = self.suffix_decoding_max_spec_factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= MAX_DRAFTS:
            raise ConfigError(
                "speculative_config: suffix_decoding_max_spec_factor must be a number above 0 and at most "
                f"{MAX_DRAFTS}; got {factor!r:.80}"
            )
        if self.model is None and self.method in _NAMING_METHODS:
            raise ConfigError(
                f'speculative_config: method {self.method!r} needs "model": the name or path of the model that drafts'
            )
        if self.model is not None and self.method not in _MODEL_METHODS:
            names = ", ".join(map(repr, _MODEL_METHODS))
            raise ConfigError(f"speculative_config: model is for methods {names}; leave it out of {self.method!r}")
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"speculative_config: model must be a name or a path; got {self.model!r:.80}")
        _check("draft_ns", self.draft_ns, 10**15, 0)
        for name in ("step_ns", "alone_ns"):
            for value in getattr(self, name):
                _check(name, value, 10**15)

    @property
    def runs_model(self) -> bool:
        """Return whether a model in the executor makes the drafts."""
        return self.method in _MODEL_METHODS

    @property
    def runs_head(self) -> bool:
        """Return whether layers that read the model's own hidden states make the drafts."""
        return self.method in ("eagle3", "mtp")


def parse_speculative_config(given: object) -> SpeculativeConfig | None:
    """Return the config of a dict or of a JSON object; None for None. Errors: ConfigError that names the key."""
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    given = json_object("speculative_config", given)
    keys: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for key, neutral in _NEUTRAL_KEYS.items():
        if key in keys and any(type(keys[key]) is type(value) and keys[key] == value for value in neutral):
            del keys[key]
    for key in keys:
        if key in _REFUSED_KEYS:
            raise ConfigError(f"speculative_config: {key} is not supported: {_REFUSED_KEYS[key]}; leave it out")
        if key not in SpeculativeConfig.__struct_fields__:
            known = ", ".join(SpeculativeConfig.__struct_fields__)
            raise ConfigError(f"speculative_config: unknown key {key!r:.80}; known are {known}")
    name = str(keys.get("model", "")).lower()
    if "method" not in keys and name:  # as in vLLM
        keys["method"] = next((method for part, method in _NAMED.items() if part in name), "draft_model")
    if not isinstance(keys.get("method"), str):
        raise ConfigError(f"speculative_config needs a method; {_have()}")
    lookup = [keys[name] for name in ("prompt_lookup_min", "prompt_lookup_max") if name in keys]
    if len(lookup) == 1:  # one alone is both, as in vLLM
        keys |= {"prompt_lookup_min": lookup[0], "prompt_lookup_max": lookup[0]}
    if keys["method"] == "suffix" and "num_speculative_tokens" not in keys:  # as in vLLM
        keys["num_speculative_tokens"] = keys.get("suffix_decoding_max_tree_depth", _MAX_DEPTH)
    if keys["method"] in _DRAFTS:
        is_assistant = keys["method"] == "mtp" and _ASSISTANT in name
        default = _DRAFTS_OF_ASSISTANT if is_assistant else _DRAFTS[keys["method"]]
        keys.setdefault("num_speculative_tokens", default)
    for name in ("step_ns", "alone_ns"):
        if not isinstance(durations := keys.get(name, ()), (list, tuple)) or len(durations) > 32:
            raise ConfigError(f"speculative_config: {name} must be a list of up to 32 integers; got {durations!r:.80}")
        keys[name] = tuple(durations)
    return SpeculativeConfig(**keys)


def _have() -> str:
    return f"this version supports {', '.join(_METHODS)}"


def _check(name: str, value: object, most: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"speculative_config: {name} must be an integer from {least} to {most}; got {value!r:.80}")
