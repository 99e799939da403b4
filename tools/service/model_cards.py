"""model_cards: what a model of `serve --models` takes in memory, from the headers of its files."""

import math
import os
from pathlib import Path

import msgspec

from core.model_files.inspection import Inspection, inspect_model
from core.models.operations.weight_form import WeightForm, best_form
from core.process.resolve import default_cache_bytes
from frontend.http.many.catalog import Entry
from frontend.http.many.messages import Card
from ipc.errors import EngineCoreError
from ipc.files.hub_cache import find_cached
from ipc.files.model_files import resolve_model
from ipc.machine.cpus import usable_cpus
from ipc.options.config import EngineConfig
from kernels.cpu.build import usable_variants, variant_of

#: Bytes of an engine's process without weights and caches: Python, its libraries, activations of a step.
PROCESS_BYTES = 256 << 20


def card_of(entry: Entry, memory: int) -> Card:
    """Return what is known of a model. memory: bytes for all models, of which a KV cache takes a quarter by default."""
    try:
        config = entry.config()
        path = resolve_model(find_cached(config.model))
        weights, found = (0, None) if config.executor == "fake" else _weights(path, config)
    except EngineCoreError as error:
        return _card(entry, None, problem=str(error))
    if found is not None and not found.runs_with:
        return _card(entry, None, problem="; ".join(found.refusals))
    kv = kv_bytes(config, memory)
    swap = 0 if config.preemption_mode == "recompute" else config.swap_space_bytes
    host = swap + config.kv_host_bytes + (_in_memory(found, config) if found and config.reserve_weights else 0)
    card = _card(entry, weights + kv + host + PROCESS_BYTES, weights=weights, kv=kv, modified=os.stat(path).st_mtime)
    able: tuple[str, ...] = ("embedding",) if config.runner == "pooling" else ("completion", "tools")
    if found is None:
        return msgspec.structs.replace(card, capabilities=able)
    if found.takes_images and config.limit_mm_per_prompt.get("image") != 0:
        able = (*able, "vision")
    length = config.max_model_len or found.max_model_len
    form = {"format": found.format.lower(), "architecture": found.architecture, "max_model_len": length}
    return msgspec.structs.replace(card, capabilities=able, **form)


def kv_bytes(config: EngineConfig, memory: int) -> int:
    """Return the size of a model's KV cache: as configured, otherwise a quarter of the memory, at most 4 GiB."""
    return config.kv_cache_memory_bytes or default_cache_bytes(memory)


def _weights(path: Path, config: EngineConfig) -> tuple[int, Inspection]:
    """Return the bytes of the weights in memory, with those of a draft model."""
    found = inspect_model(path)
    total = _in_memory(found, config)
    if (draft := getattr(config.speculative_config, "model", None)) is not None:
        total += _in_memory(inspect_model(resolve_model(find_cached(draft))), config)
    return total, found


def _in_memory(found: Inspection, config: EngineConfig) -> int:
    if found.needs is None:
        return found.file_bytes
    needs = found.needs
    stored, dense = needs.weights_as_stored, needs.weights_dequantized
    if config.dtype == "float32" and config.quantization != "int8":
        return 2 * dense
    if stored is None or config.quantization == "none" or config.cpu_kernels == "torch" or config.numerics == "L0":
        return dense
    if config.quantization != "auto":
        return min(stored, dense)
    generates = config.runner != "pooling" and needs.kv_cache_per_token + needs.state_per_request > 0
    variant, threads = variant_of(config.cpu_kernels) or usable_variants()[0], config.threads or usable_cpus()
    form = best_form(variant, threads, needs.matrix_weights, has_few_rows=generates)
    both = dense + needs.weights_quantized
    return {WeightForm.STORED: stored, WeightForm.DENSE: dense, WeightForm.BOTH: both}[form]


def _card(
    entry: Entry, num_bytes: int | None, *, weights: int = 0, kv: int = 0, modified: float = 0.0, problem: str = ""
) -> Card:
    return Card(
        name=entry.name,
        num_bytes=num_bytes,
        weight_bytes=weights,
        kv_bytes=kv,
        problem=problem,
        keep_alive_s=-1.0 if math.isinf(entry.keep_alive_s) else entry.keep_alive_s,
        aliases=entry.aliases,
        adapters=entry.adapters,
        tool_call_parser=entry.tool_call_parser,
        reasoning_parser=entry.reasoning_parser,
        system=entry.system,
        modified=modified,
    )
