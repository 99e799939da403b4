"""EngineConfig: everything the engine process is told. Frozen, validated once, and itself a message."""

import difflib
import math
import os
from typing import Any, Literal, get_args

import msgspec

from ipc.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Numerics = Literal["L0", "L2"]
ExecutorName = Literal["local", "fake"]
Device = Literal["cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority", "fair"]
PreemptionMode = Literal["recompute", "swap", "auto"]
ModelImpl = Literal["auto", "native", "transformers"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
CpuKernels = Literal["auto", "c", "torch"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one engine. None means "the engine decides at its start"; a resolved config (core/process/resolve.py)
    has no None left but in `model` and `capture`. Errors: ConfigError naming the option and what is allowed."""

    model: str | None = None  # folder (config.json, safetensors), .gguf file or org/name; None = the demo model
    executor: ExecutorName = "local"  # "fake": tokens are a function of ids and positions; no model, no torch
    load_format: LoadFormat = "auto"  # "dummy": random weights for this config; no weight is read
    dtype: Dtype = "auto"  # auto = bfloat16 where the CPU has bf16 instructions, else float32
    device: Device = "cpu"  # "cuda": an NVIDIA GPU, by Triton's kernels; numerics level L0
    model_impl: ModelImpl = "auto"  # auto: our own code where there is some for the architecture, else transformers'
    numerics: Numerics = "L2"  # L2: a request's tokens never depend on its neighbours; L0: torch's operations
    threads: int | None = None  # compute threads; None = the CPUs this process may use
    max_model_len: int | None = None  # tokens; None = the model's, clipped to the KV cache
    max_num_seqs: int = 32  # requests running at once
    max_num_batched_tokens: int | None = None  # token budget of a step; None = 512, or the longest whole prompt
    block_size: int = 16  # tokens in a KV block; a power of two up to 128
    kv_cache_memory_bytes: int | None = None  # None = a quarter of the memory, at most 4 GiB
    num_blocks_override: int | None = None  # exact number of KV blocks, whatever the memory
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_aging_seconds: float = 0.0  # of policy priority: waiting so long weighs as one priority; 0 = no aging
    fair_quantum: int = 4096  # of policy fair: tokens a client may be ahead before it makes room for another
    client_weights: dict[str, float] = {}  # of policy fair: shares of clients by the name in their Hello; others have 1
    preemption_mode: PreemptionMode = "recompute"  # auto: whichever is cheaper by the two costs below
    swap_space_bytes: int = 2**30  # of host memory for the blocks of preempted requests; not with recompute
    num_swap_blocks: int | None = None  # exact number of blocks in that memory
    recompute_ns_per_token: int | None = None  # None = measured at start, where preemption_mode is auto
    swap_ns_per_block: int | None = None  # one way; None = measured at start, where preemption_mode is auto
    enable_chunked_prefill: bool = True  # no: whole prompts, in steps of their own
    long_prefill_token_threshold: int = 0  # most prompt tokens of one request in a step while others live; 0 = no limit
    max_num_partial_prefills: int = 0  # prompts that may be in the middle of several steps at once; 0 = no limit
    scheduler_delay_factor: float = 0.0  # prompts gather for so many times the last prompt step's duration
    admission_lookahead: int = 8  # requests that may start before an older one that does not fit, in its life
    watermark: float = 0.01  # share of the KV blocks that a start leaves free while others run
    reserve_full_length: bool = False  # start only with all the blocks that a request can ever need: no preemption
    max_num_queued_requests: int = 65_536  # of all clients, that have not begun; more are refused with a hint
    max_num_queued_tokens: int = 2**26  # of those requests; int32, so 256 MiB
    max_client_bytes: int = 2**28  # of one client's unfinished requests, as sent
    client_lease_ms: int = 30_000  # a client that is silent for so long is gone; its heartbeats come 3 times as often
    async_scheduling: bool = False  # schedule step N+1 before the tokens of step N are known (depth 2)
    capture: str | None = None  # file to log all inputs and decisions to, for `engine-core replay`; it must not exist
    fake_vocab_size: int = 32_000  # of the fake executor
    fake_eos_token_id: int = 2
    fake_max_model_len: int = 131_072
    max_logprobs: int = 20  # that a request may ask for at each position; -1 = any number, up to the whole vocabulary
    logprobs_mode: LogprobsMode = "raw_logprobs"  # logarithms or logits; raw, or what the sampler draws from
    cpu_kernels: CpuKernels = "auto"  # auto: the C kernels where a wheel or a compiler has them, else torch's
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory that the engine may take in all; of device cuda
    enforce_eager: bool = False  # no CUDA graphs; of device cuda
    generation_config: str = "auto"  # default sampling parameters: the model's, "vllm" = neutral, or a folder's

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        for name, (low, high) in _RANGES.items():
            _check_integer(name, getattr(self, name), low, high, optional=name in _OPTIONAL)
        for name, most in _FRACTIONS.items():
            _check_number(name, getattr(self, name), most)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false; got {getattr(self, name)!r}")
        if self.capture is not None and not (isinstance(self.capture, str) and self.capture):
            raise ConfigError(f"capture must be the path of a file to write; got {self.capture!r}")
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ConfigError(
                f"generation_config must be 'auto', 'vllm' or the path of a folder; got {self.generation_config!r}"
            )
        _check_weights(self.client_weights)
        _check_model(self.model)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two from 1 to 128; got {self.block_size}")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError("long_prefill_token_threshold cuts prompts, which enable_chunked_prefill=false forbids")
        _check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        if self.async_scheduling and self.executor == "local" and self.device == "cpu":
            raise ConfigError(
                "async_scheduling=true needs an executor that overlaps; 'local' on a CPU does not, device=cuda does"
            )


_CHOICES: dict[str, tuple[str, ...]] = {
    "executor": get_args(ExecutorName),
    "load_format": get_args(LoadFormat),
    "dtype": get_args(Dtype),
    "device": get_args(Device),
    "model_impl": get_args(ModelImpl),
    "cpu_kernels": get_args(CpuKernels),
    "numerics": get_args(Numerics),
    "scheduling_policy": get_args(SchedulingPolicy),
    "logprobs_mode": get_args(LogprobsMode),
    "preemption_mode": get_args(PreemptionMode),
}
_RANGES: dict[str, tuple[int, int]] = {
    "threads": (1, 1024),
    "max_model_len": (2, 2**24),
    "max_num_seqs": (1, 65_536),
    "max_num_batched_tokens": (1, 2**24),
    "block_size": (1, 128),
    "kv_cache_memory_bytes": (1, 2**44),
    "num_blocks_override": (2, 2**30),
    "fair_quantum": (0, 2**40),
    "swap_space_bytes": (0, 2**44),
    "num_swap_blocks": (0, 2**30),
    "recompute_ns_per_token": (1, 10**12),
    "swap_ns_per_block": (1, 10**12),
    "long_prefill_token_threshold": (0, 2**20),
    "max_num_partial_prefills": (0, 65_536),
    "admission_lookahead": (0, 4096),
    "max_num_queued_requests": (1, 2**24),
    "max_num_queued_tokens": (1, 2**32),
    "max_client_bytes": (1, 2**40),
    "client_lease_ms": (100, 2**31),
    "fake_vocab_size": (4, 2**24),
    "fake_eos_token_id": (0, 2**24),
    "fake_max_model_len": (2, 2**24),
    "max_logprobs": (-1, 2**24),
}
_SWITCHES = (
    "enable_prefix_caching",
    "async_scheduling",
    "enable_chunked_prefill",
    "reserve_full_length",
    "enforce_eager",
)
#: Numbers from 0 up to this.
_FRACTIONS = {"priority_aging_seconds": 1e6, "scheduler_delay_factor": 1e6, "watermark": 0.5}
_MIN_WEIGHT, _MAX_WEIGHT = 1e-3, 1e3
_MAX_MODEL_BYTES = 4096  # Linux' PATH_MAX
_OPTIONAL = frozenset(
    (
        "threads",
        "max_model_len",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "num_blocks_override",
        "num_swap_blocks",
        "recompute_ns_per_token",
        "swap_ns_per_block",
    )
)

#: Options of vLLM's LLM() that mean nothing here; accepted at the values under which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "trust_remote_code": (True, False),  # nothing remote is ever run
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
#: The same for numbers: (above, up to).
_NEUTRAL_NUMBERS: dict[str, tuple[float, float]] = {
    "max_seq_len_to_capture": (0, 2**24),
}
#: vLLM's names of our options, and of our options' values.
_ALIASES = {"num_gpu_blocks_override": "num_blocks_override"}
_DTYPE_ALIASES = {"float": "float32"}


def config_from_options(**options: Any) -> EngineConfig:
    """The EngineConfig of these options. Errors: ConfigError for a bad value or an unknown option."""
    fields = EngineConfig.__struct_fields__
    accepted: dict[str, Any] = {}
    for given, value in options.items():
        name = _ALIASES.get(given, given)
        if name in accepted:
            raise ConfigError(f"{given} is another name of an option that was given too; leave one of them out")
        if name in fields or name == "swap_space":  # vLLM's, in GiB
            accepted[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
        elif name in _NEUTRAL or name in _NEUTRAL_NUMBERS:
            _check_neutral(name, value)
        else:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"unknown option {name!r}; {hint}known options: {', '.join(fields)}")
    for name in ("enable_chunked_prefill", "generation_config"):
        if accepted.get(name, True) is None:  # vLLM's "decide yourself"
            del accepted[name]
    if (gibibytes := accepted.pop("swap_space", None)) is not None:
        _check_number("swap_space", gibibytes, 2**14)
        accepted.setdefault("swap_space_bytes", round(gibibytes * 2**30))
    if isinstance(dtype := accepted.get("dtype"), str):
        accepted["dtype"] = _DTYPE_ALIASES.get(dtype, dtype)
    return EngineConfig(**accepted)


def _check_neutral(name: str, value: object) -> None:
    if name in _NEUTRAL:
        if value not in _NEUTRAL[name]:
            allowed = " or ".join(repr(choice) for choice in _NEUTRAL[name])
            raise ConfigError(f"{name}={value!r} is not supported by this version; only {allowed} is")
        return
    low, high = _NEUTRAL_NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise ConfigError(f"{name} must be a number above {low} and up to {high}; got {value!r}")


def _check_number(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ConfigError(f"{name} must be a number from 0 to {most:g}; got {value!r}")


def _check_weights(weights: object) -> None:
    if not isinstance(weights, dict) or not all(isinstance(name, str) and name for name in weights):
        raise ConfigError(f"client_weights must be a dict of client names and weights; got {weights!r:.80}")
    for name, weight in weights.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
            raise ConfigError(
                f"client_weights: the weight of {name!r:.80} must be a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}; "
                f"got {weight!r:.80}"
            )


def _check_model(model: object) -> None:
    if model is None:
        return
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be a model folder, a .gguf file or a Hugging Face name; got {model!r:.80}")
    if any("\ud800" <= character <= "\udfff" for character in model) or "\0" in model:
        raise ConfigError(f"model must be valid UTF-8 without NUL; got {model!r:.80}")
    if (size := len(model.encode())) > _MAX_MODEL_BYTES:
        raise ConfigError(f"model must be at most {_MAX_MODEL_BYTES} bytes long; got {size}, beginning {model!r:.80}")


def _check_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be a number above 0 and up to 1; got {value!r}")


def _check_integer(name: str, value: object, low: int, high: int, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        raise ConfigError(f"{name} must be an integer from {low} to {high}; got {value!r}, write {int(value)}")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}; got {value!r}")
