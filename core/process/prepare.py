"""prepare: the part of an engine's start that depends only on its config: tokenizer, executor, sizes, KV cache, costs.

An engine does this when it starts, a standby in advance (core/process/standby.py). Each phase is reported to the owner.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from core import log
from core.execution.executor import Executor, UpdatesWeights
from core.executors.by_name import import_executor, load_executor
from core.model_files.progress import following
from core.process.resolve import resolve, resolve_costs
from core.scheduling.by_name import import_scheduler
from core.scheduling.draft_rule import DraftRule
from ipc.errors import ConfigError
from ipc.files.model_files import tokenizer_hash
from ipc.machine.cpus import usable_cpus
from ipc.machine.memory import usable_memory_bytes
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.options.step_sizes import with_rows
from ipc.options.tokenizer_files import client_files_of
from ipc.options.workers import has_workers
from ipc.wire.messages import ModelDescription, TokenizerFiles

if TYPE_CHECKING:  # it imports kernels, which must be checked first
    from core.features.store import Features

Report = Callable[[str], None]


class Prepared(NamedTuple):
    """An executor that is ready to run, and what is reported about it to clients."""

    config: ResolvedConfig
    executor: Executor
    tokenizer: TokenizerFiles
    default_sampling: dict[str, float | int]
    warm_up_ns: int  # from Executor.warm_up()
    description: ModelDescription | None = None


def prepare(config: EngineConfig, report: Report, *, step_tokens: int = 0) -> Prepared:
    """Load the model and create its KV cache. step_tokens: see resolve(). Errors: those of ipc.errors about the config,
    the model's files and memory.
    """
    # Imported late, as below.
    from core.model_files.settings.default_sampling import read_default_sampling
    from core.model_files.settings.model_description import describe_model

    _check_reserve(config, None)
    report("read tokenizer")
    default_sampling = read_default_sampling(config)  # first: of a GGUF file it reads the header, which is kept
    description = describe_model(config)
    files = client_files_of(config)
    prepare_imports(config, report)
    report("load model")
    with following(lambda share: report(f"load model, {share:.0%}")):
        executor = load_executor(config)
    _check_reserve(config, executor)
    if config.enable_lora and executor.adapters is None:
        raise ConfigError(f"enable_lora: executor {config.executor!r} does not support adapters: leave it out")
    executor.grammars.use_files(files)
    report("kv cache")
    resolved = resolve(
        config,
        executor.info,
        executor.determine_num_available_blocks,
        total_memory_bytes=usable_memory_bytes(),
        num_cpus=usable_cpus(),
        device_bytes=None if config.kv_cache_memory_bytes else executor.cache_memory_bytes(),
        step_tokens=step_tokens,
    )
    if config.max_model_len is None and resolved.max_model_len < executor.info.max_model_len:
        option = "kv_cache_memory_bytes" if config.num_blocks_override is None else "num_blocks_override"
        log.say(
            f"engine-core: max_model_len is {resolved.max_model_len} instead of the model's "
            f"{executor.info.max_model_len}: the KV cache is too small for more ({option})"
        )
    _say_sizes(config, resolved, executor.info.device_memory_bytes)
    executor.initialize_cache(resolved)
    resolved = resolve_costs(resolved, config, executor.measure_costs, executor.measure_steps)
    if (settings := resolved.speculative_config) is not None:
        _warn_of_dear_drafts(settings)
    tokenizer = TokenizerFiles(0, tokenizer_hash(files) if files else "", files)
    return Prepared(resolved, executor, tokenizer, default_sampling, executor.warm_up(), description)


def _check_reserve(config: EngineConfig, executor: Executor | None) -> None:
    """Refuse reserve_weights for an engine that cannot use it. executor: None = not loaded yet. Errors: ConfigError."""
    if not config.reserve_weights:
        return
    reason = ""
    if has_workers(config):
        reason = "it has worker processes"
    elif config.device == "cuda":
        reason = "it runs on a GPU"
    elif executor is not None and not isinstance(executor, UpdatesWeights):
        reason = f"executor {config.executor!r} cannot change weights"
    elif executor is not None and not executor.expects_weights:
        reason = executor.why_fixed or "it does not compute with the C kernels at numerics level L2"
    if reason:
        raise ConfigError(f"reserve_weights: no memory is taken for other weights, because {reason}: leave it out")


def _say_sizes(config: EngineConfig, resolved: ResolvedConfig, device_bytes: int) -> None:
    """Say which sizes of a step were chosen for a device, and which are smaller than wanted."""
    if (wanted := with_rows(config, device_bytes).max_num_seqs) > resolved.max_num_seqs:
        log.say(
            f"engine-core: max_num_seqs is {resolved.max_num_seqs} instead of {wanted}: half of "
            "kv_cache_memory_bytes is too small for more recurrent states"
        )
    chosen = [name for name in ("max_num_seqs", "max_num_batched_tokens") if getattr(config, name) is None]
    if device_bytes and chosen:
        sizes = " and ".join(f"{name}={getattr(resolved, name)}" for name in chosen)
        log.say(f"engine-core: {sizes}, chosen by the device's memory of {device_bytes / 2**30:.0f} GiB")


def _warn_of_dear_drafts(settings: SpeculativeConfig) -> None:
    if not DraftRule(settings.step_ns, settings.draft_ns).can_pay(settings.num_speculative_tokens):
        log.say(
            f"engine-core: speculative_config: the drafts of one row take {settings.draft_ns / 1e6:.1f} ms and a step "
            f"{settings.step_ns[0] / 1e6:.1f} ms: even accepted drafts would save no time, so none are used; a smaller "
            "draft model, or none, is faster"
        )


def features_of(executor: Executor) -> "Features | None":
    """Return the features that requests may have. An executor that supports them has this additional attribute."""
    features: Features | None = getattr(executor, "features", None)
    return features


def prepare_imports(config: EngineConfig, report: Report) -> None:
    """Import what an engine with this config runs. Errors: ConfigError."""
    report("import")
    runs_here = config.executor == "local" and not has_workers(config)
    if runs_here and config.device == "cpu" and config.cpu_kernels != "torch":
        # Imported late: the check that `kernels` is our package runs after core is imported.
        from kernels.cpu.build import variant_of
        from kernels.cpu.library_file import find_library_soon

        wanted = variant_of(config.cpu_kernels)
        find_library_soon(wanted, lambda: report("compile kernels"))  # in parallel with the import of the executor
    with _keeping_all():
        import_executor(config)
        import_scheduler(config)


@contextlib.contextmanager
def _keeping_all() -> Iterator[None]:
    """Keep all objects that exist at the end forever: the garbage collector never scans them again.

    The collector does not run inside this context either. Importing torch, if needed, creates a quarter of a million
    objects. Scanning them during the import took a tenth of the start, and a later scan took a tenth of a second
    between two steps.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
