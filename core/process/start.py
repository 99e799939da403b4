"""The engine's start: socket, executor, resolved config, KV cache, EngineCore. Each phase is reported to the owner."""

import contextlib
import gc
import os
import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple

import zmq

from core import log
from core.border.allow_list import AllowList
from core.border.io_thread import IOThread
from core.border.meter import RequestMeter
from core.border.reception import Served
from core.border.zap import start_zap
from core.capture.engine import CapturedEngine, capture_path, start_capture
from core.capture.writer import check_capture
from core.engine import EngineCore
from core.execution.executor import Executor, ModelInfo
from core.executors.by_name import import_executor, load_executor
from core.model_files.default_sampling import read_default_sampling
from core.model_files.progress import following
from core.process.black_box import BlackBox
from core.process.loop import Engine
from core.process.resolve import resolve, resolve_costs
from ipc.config import EngineConfig
from ipc.cpus import usable_cpus
from ipc.files.model_files import tokenizer_hash
from ipc.files.tokenizer_files import tokenizer_files_of
from ipc.memory import usable_memory_bytes
from ipc.messages import (
    MAX_CLIENT_MESSAGE_BYTES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Limits,
    ModelInformation,
    TokenizerFiles,
    Welcome,
)
from ipc.sockets import BoundRouter, Context, bind_router, keys_of
from ipc.start_messages import Start
from ipc.version import VERSION

Report = Callable[[str], None]

#: Objects, then collections of the generation before. With Python's own numbers (700, 10, 10) some thousand requests
#: that arrive at once bring about full collections, each of which stops both threads for 60 ms beside 20,000 requests.
_GC_THRESHOLDS = 700, 10, 200


class StartedEngine(NamedTuple):
    """An engine ready to run, with its executor and IO thread."""

    engine: Engine
    executor: Executor
    io: IOThread  # bound, not yet running
    box: BlackBox
    close_capture: Callable[[], None]  # writes what is pending; from any thread, more than once


def bind(start: Start) -> tuple[Context, BoundRouter]:
    """Bind the engine's socket, before anything else, so that a bad or busy address fails before the model loads.

    Errors: AddressError, ConfigError.
    """
    context: Context = zmq.Context()
    try:
        keys = keys_of(start.address)
        start_zap(context, None if keys is None else AllowList(keys))
        return context, bind_router(context, start.address, is_private=start.is_private)
    except BaseException:
        context.term()
        raise


def start_engine(start: Start, context: Context, router: BoundRouter, report: Report) -> StartedEngine:
    """Load the model and make the engine. Errors: those of ipc.errors that concern the config, the model's files and
    memory.
    """
    config = start.config
    if (capture := capture_path(config, start.epoch)) is not None:
        check_capture(capture)
    report("read tokenizer")
    default_sampling = read_default_sampling(config)  # first: of a GGUF file it reads the header, which is kept
    tokenizer = _read_tokenizer(config)
    report("import")
    if config.executor == "local" and config.device == "cpu" and config.cpu_kernels != "torch":
        # Imported late: the check that `kernels` is ours runs after the import of core.
        from kernels.cpu.build import variant_of
        from kernels.cpu.library_file import find_library_soon

        wanted = variant_of(config.cpu_kernels)
        find_library_soon(wanted, lambda: report("compile kernels"))  # beside the import of the executor
    with keeping_all():
        import_executor(config)
    report("load model")
    with following(lambda share: report(f"load model, {share:.0%}")):
        executor = load_executor(config)
    executor.grammars.use_files(tokenizer.files)
    report("kv cache")
    config = resolve(
        config,
        executor.info,
        executor.determine_num_available_blocks,
        total_memory_bytes=usable_memory_bytes(),
        num_cpus=usable_cpus(),
        device_bytes=None if config.kv_cache_memory_bytes else executor.cache_memory_bytes(),
    )
    is_chosen = start.config.max_model_len is not None or start.config.num_blocks_override is not None
    if not is_chosen and (config.max_model_len or 0) < executor.info.max_model_len:
        log.say(
            f"engine-core: max_model_len is {config.max_model_len}, and not the model's {executor.info.max_model_len}: "
            "the KV cache has room for no more (kv_cache_memory_bytes)"
        )
    executor.initialize_cache(config)
    config = resolve_costs(config, executor.measure_costs, executor.measure_steps)
    welcome = _welcome(config, executor.info, start, tokenizer, default_sampling)
    model = _model_information(config, executor.info)
    served = Served(welcome, tokenizer, model, start.owner_token, config.client_weights, _meter(config), start.isolate)
    gc.collect()  # only objects made after the imports: under a millisecond
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    io = IOThread(context, router, served, executor.grammars)
    return _make_engine(start, config, executor, io, capture)


def _make_engine(
    start: Start, config: EngineConfig, executor: Executor, io: IOThread, capture: str | None
) -> StartedEngine:
    """Return the engine, whose steps are noted in its black box. capture: a file that its inputs go to, too."""
    box = BlackBox(start.black_box_fd, config.max_num_seqs, start.epoch, executor.warm_up())
    if capture is None:
        core = EngineCore(config, executor, start.epoch, [box])
        box.watch(core.scheduler)
        return StartedEngine(core, executor, io, box, lambda: None)
    writer = start_capture(capture, config, executor.info, VERSION, start.epoch)
    log.say(f"engine-core: every prompt and answer is captured to {capture}")
    captured = CapturedEngine(config, executor, writer, start.epoch, [box], io.inbox.received_ns)
    box.watch(captured.engine.scheduler)
    return StartedEngine(captured, executor, io, box, writer.close)


@contextlib.contextmanager
def keeping_all() -> Iterator[None]:
    """Keep all objects that exist at the end for the life of the process: the garbage collector never scans them again.

    It does not run inside this context either. An import of torch, where there is one, makes a quarter of a million
    objects. Scanning them meanwhile took a tenth of the start; a later scan took a tenth of a second between two steps.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _meter(config: EngineConfig) -> RequestMeter | None:
    if not config.request_metrics and not config.log_requests:
        return None
    return RequestMeter(config.max_model_len or 0, log.say if config.log_requests else None)


def _read_tokenizer(config: EngineConfig) -> TokenizerFiles:
    files = tokenizer_files_of(config)
    return TokenizerFiles(0, tokenizer_hash(files) if files else "", files)


def _welcome(
    config: EngineConfig,
    info: ModelInfo,
    start: Start,
    tokenizer: TokenizerFiles,
    default_sampling: dict[str, float | int],
) -> Welcome:
    assert config.max_model_len is not None, config
    return Welcome(
        major=PROTOCOL_MAJOR,
        minor=PROTOCOL_MINOR,
        server_version=VERSION,
        engine_id=secrets.token_hex(8),
        epoch=start.epoch,
        session_token=b"",
        model_name=info.name,
        model_fingerprint=info.fingerprint,
        tokenizer_hash=tokenizer.tokenizer_hash,
        numerics=info.numerics,
        vocab_size=info.vocab_size,
        limits=Limits(
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_message_bytes=MAX_CLIENT_MESSAGE_BYTES,
            max_num_queued_requests=config.max_num_queued_requests,
            max_num_queued_tokens=config.max_num_queued_tokens,
            max_client_bytes=config.max_client_bytes,
            heartbeat_ms=config.client_lease_ms // 3,
            lease_ms=config.client_lease_ms,
            max_logprobs=config.max_logprobs,
            resume_ms=start.resume_ms,
        ),
        default_sampling=default_sampling,
        pid=os.getpid(),
        tasks=info.tasks,
        is_encoder=info.is_encoder,
    )


def _model_information(config: EngineConfig, info: ModelInfo) -> ModelInformation:
    assert config.max_model_len is not None, config
    assert config.max_num_batched_tokens is not None, config
    assert config.num_blocks_override is not None, config
    return ModelInformation(
        call=0,
        model_name=info.name,
        model_fingerprint=info.fingerprint,
        numerics=info.numerics,
        executor=config.executor,
        dtype=config.dtype,
        vocab_size=info.vocab_size,
        eos_token_ids=list(info.eos_token_ids),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=config.num_blocks_override,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
