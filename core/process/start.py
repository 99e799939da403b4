"""The engine's start: its socket, what core/process/prepare.py loads, EngineCore and the IO thread."""

import os
import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import zmq

from core import log
from core.adapters.remembered import RememberedModules
from core.border.allow_list import AllowList
from core.border.feature_shelf import FeatureShelf, NoFeatures
from core.border.io_thread import IOThread
from core.border.meter import RequestMeter
from core.border.preparation import Preparer
from core.border.reception import Served
from core.border.zap import start_zap
from core.capture.engine import CapturedEngine, capture_path, make_header, start_capture
from core.capture.flight_recorder import FlightRecorder
from core.capture.writer import CaptureWriter, check_capture
from core.engine import EngineCore
from core.execution.executor import Executor, ModelInfo, MortalExecutor
from core.features.store import encoder_ns
from core.grammars.checker import CheckedGrammars
from core.process.black_box import BlackBox
from core.process.garbage import settle_garbage
from core.process.kv_store import OpenStores, open_stores, start_store, with_orders
from core.process.loop import Engine
from core.process.prepare import Prepared, Report, features_of, prepare
from core.tiers.store_thread import StoreThread
from ipc.options.resolved import ResolvedConfig
from ipc.params.pooling_params import generates
from ipc.version import VERSION
from ipc.wire.messages import (
    MAX_CLIENT_MESSAGE_BYTES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Arithmetic,
    Limits,
    ModelInformation,
    TokenizerFiles,
    Welcome,
)
from ipc.wire.sockets import BoundRouter, Context, bind_router, keys_of
from ipc.wire.start_messages import Start


class StartedEngine(NamedTuple):
    """An engine ready to run, with its executor and IO thread."""

    engine: Engine
    executor: Executor
    io: IOThread  # bound, not yet running
    turn: Callable[[int], None]  # called at the end of each round of the loop
    store: StoreThread | None
    close_capture: Callable[[], None]  # writes what is pending; callable from any thread, and repeatedly
    rest: Callable[[], None] = lambda: None  # called while the engine is idle


class Bound(NamedTuple):
    """The engine's socket, before anything is read from it."""

    context: Context
    router: BoundRouter
    allowed: AllowList | None  # clients whose keys may connect; None = clients have no keys


def bind(start: Start) -> Bound:
    """Bind the engine's socket before anything else, so that a bad or busy address fails before the model loads.

    Errors: AddressError, ConfigError.
    """
    context: Context = zmq.Context()
    try:
        keys = keys_of(start.address)
        allowed = None if keys is None else AllowList(keys)
        start_zap(context, allowed)
        return Bound(context, bind_router(context, start.address, is_private=start.is_private), allowed)
    except BaseException:
        context.term()
        raise


def start_engine(start: Start, bound: Bound, report: Report, prepared: Prepared | None = None) -> StartedEngine:
    """Load the model and create the engine. prepared: what a standby has already loaded for start.config.

    Errors: those of ipc.errors about the config, the model's files and memory.
    """
    if (capture := capture_path(start.config, start.epoch)) is not None:
        check_capture(capture)
    prepared = prepared or prepare(start.config, report)
    config, executor, tokenizer, default_sampling, warm_up_ns, description = prepared
    if (adapters := executor.adapters) is not None:
        adapters.remember(RememberedModules(start.adapters_fd))
    features = features_of(executor)
    shelf: FeatureShelf = NoFeatures() if features is None else features
    welcome = msgspec.structs.replace(
        _welcome(config, executor.info, start, tokenizer, shelf),
        default_sampling=default_sampling,
        description=description,
    )
    model = _model_information(config, executor.info)
    served = Served(
        welcome,
        tokenizer,
        model,
        start.owner_token,
        config.client_weights,
        _meter(config),
        start.isolate,
        None if bound.allowed is None else bound.allowed.quota_of,
        shelf,
    )
    settle_garbage()
    grammars = CheckedGrammars(executor.grammars)
    preparers: list[Preparer] = [grammars]
    if features is not None:
        preparers.append(features)
    io = IOThread(bound.context, bound.router, served, preparers, adapters=adapters)
    if isinstance(executor, MortalExecutor):
        executor.follow(io.put_news)
    stores = open_stores(config, executor)
    box = BlackBox(start.black_box_fd, config.max_num_seqs, start.epoch, warm_up_ns, wait_ns=encoder_ns(features))
    engine = _make_engine(start, config, executor, io, capture, box, stores)
    return engine._replace(rest=grammars.load_ahead) if generates(executor.info.tasks) else engine


def _make_engine(
    start: Start,
    config: ResolvedConfig,
    executor: Executor,
    io: IOThread,
    capture: str | None,
    box: BlackBox,
    stores: OpenStores | None,
) -> StartedEngine:
    """Return the engine, whose steps are recorded in its black box.

    Its inputs and decisions go to the file `capture`, or to the flight recorder created by the owner.
    """
    writer: CaptureWriter | FlightRecorder
    if capture is not None:
        writer = start_capture(capture, config, executor.info, VERSION, start.epoch)
        log.say(f"engine-core: every prompt and answer is captured to {capture}")
    elif start.flight_fd >= 0:
        header = make_header(config, executor.info, VERSION, start.epoch)
        writer = FlightRecorder(start.flight_fd, header, config.flight_recorder_seconds)
    else:
        core = EngineCore(config, executor, start.epoch, [box])
        box.watch(core.scheduler)
        store = start_store(stores, executor, core, io.put_news)
        return StartedEngine(with_orders(core, core, store), executor, io, box.turn, store, lambda: None)
    captured = CapturedEngine(
        config, executor, writer, start.epoch, watchers=[box], received=io.inbox.received_ns, copies_early=True
    )
    core = captured.engine
    box.watch(core.scheduler)
    store = start_store(stores, executor, core, io.put_news)
    return StartedEngine(with_orders(captured, core, store), executor, io, box.turn, store, writer.close)


def _meter(config: ResolvedConfig) -> RequestMeter | None:
    if not config.request_metrics and not config.log_requests:
        return None
    return RequestMeter(config.max_model_len, log.say if config.log_requests else None)


def _welcome(
    config: ResolvedConfig,
    info: ModelInfo,
    start: Start,
    tokenizer: TokenizerFiles,
    features: FeatureShelf,
) -> Welcome:
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
        pid=os.getpid(),
        tasks=info.tasks,
        is_encoder=info.is_encoder,
        features=features.limits,
        arithmetic=Arithmetic(info.weights, info.dtype, info.variant, info.cpu_kernels) if info.weights else None,
    )


def _model_information(config: ResolvedConfig, info: ModelInfo) -> ModelInformation:
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
