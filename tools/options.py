"""EngineConfig's fields as command line flags, with the names other engines' users know as silent aliases."""

import argparse
import difflib
import sys
from types import UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec

from ipc.config import EngineConfig

#: Every field of EngineConfig and what its flag's help says.
HELP = {
    "model": "folder with config.json and *.safetensors, .gguf file, or Hugging Face name; default: the demo model",
    "executor": "'fake' answers with made-up tokens and needs no model",
    "load_format": "format of the weights; 'dummy' makes them up, for benchmarks of a config",
    "dtype": "type of weights and arithmetic; auto = bfloat16 where the CPU (or GPU) has it, else float32",
    "device": "where the model runs; cuda = on an NVIDIA GPU, by Triton's kernels",
    "model_impl": "whose model code; auto = ours where there is some for the architecture, else transformers'",
    "numerics": "L2: a request's tokens never depend on its neighbours; L0: torch's operations",
    "threads": "compute threads; default: the CPUs this process may use",
    "max_model_len": "tokens of prompt and output together; default: the model's",
    "max_num_seqs": "requests running at once",
    "max_num_batched_tokens": "token budget of a step; default: 512, with whole prompts at least max_model_len",
    "block_size": "tokens in a KV block, a power of two up to 128",
    "kv_cache_memory_bytes": "KV cache, in bytes or as 512M, 2G; default: a quarter of the memory, at most 4G",
    "num_blocks_override": "exact number of KV blocks, whatever the memory",
    "enable_prefix_caching": "reuse the KV blocks of equal beginnings",
    "scheduling_policy": "who goes first: by arrival, by priority, or clients by what they have been served",
    "priority_aging_seconds": "policy priority: waiting so long weighs as one priority; 0 = priorities are absolute",
    "fair_quantum": "policy fair: tokens a client may be ahead of another before it makes room for it",
    "client_weights": "policy fair: share of the clients of this name; others have 1; may be given again",
    "preemption_mode": "compute again what was preempted, copy it to the host and back, or the cheaper of both",
    "swap_space_bytes": "host memory for preempted requests, in bytes or as 512M, 2G; not with recompute",
    "num_swap_blocks": "exact number of KV blocks in that memory; default: what fits",
    "recompute_ns_per_token": "cost of computing a token again; default: measured at start where it is needed",
    "swap_ns_per_block": "cost of copying a block to the host; default: measured at start where it is needed",
    "enable_chunked_prefill": "prompts share steps with decoding; no = whole prompts, in steps of their own",
    "long_prefill_token_threshold": "most tokens of a prompt in one step while other requests live; 0 = no limit",
    "max_num_partial_prefills": "prompts that may be in the middle of several steps at once; 0 = no limit",
    "scheduler_delay_factor": "let prompts gather for so many times the duration of the last step with prompts",
    "admission_lookahead": "how many requests may start before an older one that does not fit",
    "watermark": "share of the KV blocks that a start leaves free while others run",
    "reserve_full_length": "start a request only with all the KV blocks that it can ever need",
    "max_num_queued_requests": "requests of all clients that may wait to begin; more are refused",
    "max_num_queued_tokens": "tokens of those requests",
    "max_client_bytes": "unfinished requests of one client, in bytes or as 512M, 2G",
    "client_lease_ms": "a client that is silent for so many milliseconds is gone",
    "async_scheduling": "schedule a step before the tokens of the one before are known",
    "capture": "log every request and decision to this new file, for `engine-core replay`; it holds all prompts",
    "fake_vocab_size": "vocabulary of the fake executor",
    "fake_eos_token_id": "end token of the fake executor",
    "fake_max_model_len": "max_model_len of the fake executor",
    "max_logprobs": "log probabilities that a request may ask for at each position; -1 = any number",
    "logprobs_mode": "logarithms or logits; raw: as the model gave them, processed: what the sampler draws from",
    "cpu_kernels": "whose CPU kernels; auto = the C ones where a wheel or a C compiler has them, else torch's",
    "gpu_memory_utilization": "share of a GPU's memory that the engine may take",
    "enforce_eager": "no CUDA graphs on a GPU",
    "generation_config": "default sampling parameters; auto = the model's own, vllm = neutral ones, else a folder's",
}

#: vLLM's, SGLang's and llama.cpp's names of our options; accepted, not shown.
ALIASES = {
    "model": ("-m", "--model-path", "--model-id"),
    "threads": ("-t",),
    "max_model_len": ("-c", "--ctx-size", "--context-length"),
    "max_num_seqs": ("-np", "--parallel", "--max-running-requests"),
    "block_size": ("--page-size",),
    "num_blocks_override": ("--num-gpu-blocks-override",),
    "scheduling_policy": ("--schedule-policy",),
    "client_weights": ("--client-weight",),
}

_BYTE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, but flags are never abbreviated and an unknown one is answered with the nearest known."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed

    def _refuse(self, unknown: list[str]) -> NoReturn:
        shown = [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        name = unknown[0].split("=", 1)[0]
        near = difflib.get_close_matches(name, shown, n=1)
        self.error(f"unknown argument {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ""))


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of EngineConfig; options not given stay out of the namespace."""
    group = parser.add_argument_group("engine options")
    types = get_type_hints(EngineConfig)
    for field in msgspec.structs.fields(EngineConfig):
        text = HELP[field.name]
        if "default:" not in text and field.default not in (None, msgspec.NODEFAULT):
            text += f"; default: {_spell(field.default)}"
        arguments = _argument(field.name, types[field.name])
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, help=text, **arguments)
        if aliases := ALIASES.get(field.name):
            arguments.pop("metavar", None)
            group.add_argument(
                *aliases, dest=field.name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **arguments
            )


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by their EngineConfig names."""
    return {name: getattr(parsed, name) for name in EngineConfig.__struct_fields__ if hasattr(parsed, name)}


def parse_bytes(text: str) -> int:
    """'1048576', '512M' or '2G' (powers of 1024) as bytes. Errors: argparse's, for anything else."""
    unit = _BYTE_UNITS.get(text[-1:].upper(), 0)
    digits = text[:-1] if unit else text
    if not digits.isascii() or not digits.isdigit():
        raise argparse.ArgumentTypeError(f"expected bytes as 1048576, 512M or 2G, got {text!r}")
    return int(digits) * (unit or 1)


def _argument(name: str, kind: Any) -> dict[str, Any]:
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if name == "client_weights":
        return {"action": _Weights, "metavar": "NAME=W"}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    plain = [part for part in get_args(kind) if part is not type(None)] if isinstance(kind, UnionType) else [kind]
    if name.endswith("_bytes"):
        return {"type": parse_bytes, "metavar": "BYTES"}
    if plain == [float]:
        return {"type": float, "metavar": "X"}
    return {"type": int, "metavar": "N"} if plain == [int] else {"type": str, "metavar": "PATH"}


class _Weights(argparse.Action):
    """NAME=W, or a JSON object of them; given several times they add up."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        weights = dict(getattr(namespace, self.dest, {}))
        try:
            if values.startswith("{"):
                weights |= msgspec.json.decode(values, type=dict[str, float])
            else:
                name, _, weight = values.rpartition("=")
                weights[name] = float(weight)
        except ValueError:  # msgspec's are, too
            parser.error(f'argument {option}: expected NAME=W or {{"NAME": W}}, got {values!r}')
        setattr(namespace, self.dest, weights)


def _spell(default: object) -> str:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


def print_error(message: str) -> None:
    print(f"engine-core: error: {message}", file=sys.stderr, flush=True)
