"""The engine's start: its socket, what core/process/prepare.py loads, EngineCore and the IO thread."""

import os
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import zmq

from core import log
from core.adapters.remembered import RememberedModules
from core.batch.batch import Batch
from core.border.allow_list import AllowList
from core.border.feature_shelf import FeatureShelf, NoFeatures
from core.border.io_thread import IOThread
from core.border.meter import RequestMeter
from core.border.preparation import Preparer
from core.border.reception import Served
from core.border.socket_rounds import AddressedMessage
from core.border.zap import start_zap
from core.capture.engine import CapturedEngine, capture_path, make_header, start_capture
from core.capture.flight_recorder import FlightRecorder
from core.capture.writer import CaptureWriter, check_capture
from core.engine import EngineCore
from core.execution.executor import Executor, ModelInfo, MortalExecutor, UpdatesWeights
from core.execution.shared_blocks import SharedBlocks, shared_blocks_of
from core.features.image_waits import image_waits
from core.grammars.checker import CheckedGrammars
from core.inputs import EngineInput, StoreNews
from core.process.black_box import BlackBox
from core.process.garbage import settle_garbage
from core.process.loop import Engine
from core.process.prepare import Prepared, Report, features_of, prepare
from core.scheduling.interface import SchedulerInterface
from core.tiers.block_file import HEAD_BYTES
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BesideBlocks, BesideContents, BlocksServed, BlockStore, Shelves, StateContents
from core.tiers.connector import Guard, Tier, create_connector
from core.tiers.memory_shelf import Contents, MemoryShelf
from core.tiers.peer_server import PeerServer, Shelf
from core.tiers.peers import Peers
from core.tiers.portable_names import PortableNames
from core.tiers.store_thread import StoreThread
from ipc.errors import ConfigError
from ipc.options.block_stores import addresses_of, read_key_file
from ipc.options.resolved import ResolvedConfig
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.params.pooling_params import generates
from ipc.tables.arrays import Ints
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
from ipc.wire.sockets import BoundRouter, Context, bind_router, check_address, keys_of
from ipc.wire.start_messages import Start

# The stores of KV blocks that an engine's config names (a folder, peers), for its scheduler and executor.


class OpenStores(NamedTuple):
    """What an engine's config names, checked and opened. key: for the blocks' names and digests.

    tiers: in the order in which they are asked. folder: of one of them, which peers get blocks from too.
    """

    blocks: SharedBlocks
    key: bytes
    tiers: list[Tier]
    folder: BlockFolder | None
    listening: tuple[Context, BoundRouter] | None


def open_stores(config: ResolvedConfig, executor: Executor) -> OpenStores | None:
    """Open what the config names. None: it names nothing, or the engine has no prefix cache.

    Errors: ConfigError for a folder, key or connector that cannot be used, a folder without room for one block, and an
    executor that does not share its blocks; AddressError.
    """
    stores = config.kv_stores
    if not stores or not config.num_host_blocks:
        return None
    blocks = shared_blocks_of(executor)
    if blocks is None:
        raise ConfigError(f"{stores[0]}: executor {config.executor!r} does not share its blocks: leave it out")
    key = b"" if config.kv_key_file is None else read_key_file(config.kv_key_file)
    tiers: list[Tier] = []
    if config.kv_peers is not None:
        tiers.append(Tier("kv_peers", _peers(config.kv_peers), stores=False))
    if (settings := config.kv_transfer_config) is not None:
        connector = Guard(settings.kv_connector, create_connector(config))
        tiers.append(Tier("kv_transfer_config", connector, loads=settings.loads, stores=settings.stores))
    listening = None if config.kv_listen is None else _listen(config.kv_listen)
    try:
        of_state = 0 if blocks.states is None else blocks.states.bytes_per_block
        largest = max(of_state, blocks.cache.bytes_per_block * max(1, config.kv_page_blocks))
        folder = None if config.kv_dir is None else _open_folder(config.kv_dir, config.kv_dir_bytes, largest, key)
    except BaseException:
        if listening is not None:
            listening[1].close(0)
            listening[0].destroy(0)
        raise
    if folder is not None:
        tiers.insert(0, Tier("kv_dir", folder, is_near=True, retain=folder.retain))
    assert key or folder is not None, "no key: ResolvedConfig asks for kv_key_file"
    return OpenStores(blocks, key or (folder.key if folder is not None else b""), tiers, folder, listening)


def _open_folder(path: str, max_bytes: int, block_bytes: int, key: bytes) -> BlockFolder:
    file_bytes = HEAD_BYTES + block_bytes
    if max_bytes < file_bytes:
        raise ConfigError(
            f"kv_dir_bytes={max_bytes} is less than the file of one KV block, {file_bytes} bytes: "
            f"set it to at least {file_bytes}, or as much as the disk can spare"
        )
    return BlockFolder(path, max_bytes, key)


def _peers(kv_peers: str) -> Peers:
    addresses = addresses_of(kv_peers)
    for address in addresses:
        check_address(address, binding=False)
    return Peers(addresses)


def _listen(address: str) -> tuple[Context, BoundRouter]:
    """Return the context and the bound socket for peers with the address's keys, or on this machine."""
    context: Context = zmq.Context()
    try:
        keys = keys_of(address)
        start_zap(context, None if keys is None else AllowList(keys))
        return context, bind_router(context, address)
    except BaseException:
        context.term()
        raise


def start_store(
    stores: OpenStores | None, executor: Executor, core: EngineCore, tell: Callable[[StoreNews], None]
) -> StoreThread | None:
    """Start the thread that carries out the core's orders. tell: called in it with each answer."""
    scheduler = core.scheduler
    if stores is None or scheduler.exchange is None:
        return None
    blocks = stores.blocks
    content = f"{executor.info.fingerprint}\n{executor.info.dtype}\n{blocks.layout}"
    names = PortableNames(stores.key, content, scheduler.batch.block_size)
    return StoreThread(_block_store(stores, names, scheduler.batch, scheduler.exchange.evictions), tell)


def _block_store(stores: OpenStores, names: PortableNames, batch: Batch, evictions: Ints) -> BlockStore:
    """Return an engine's store."""
    host, blocks, block_names, kept = batch.host_cache, stores.blocks, batch.pool.names, batch.kept_states

    def shelves(contents: Contents, host_contents: Ints) -> Shelves:
        of_host = MemoryShelf(blocks.host, host_contents, host.times_given, stores.key, first=host.first)
        return Shelves(MemoryShelf(blocks.cache, contents, evictions, stores.key), of_host)

    beside: BesideBlocks | None = None
    of_beside: Shelves | None = None
    if block_names.beside:
        windows = beside = BesideContents(block_names)
        of_beside = shelves(windows, host.beside[0].content)
    elif kept is not None and blocks.states is not None:
        states = beside = StateContents(kept)
        shelf = MemoryShelf(blocks.states, states, kept.times_given, stores.key)
        of_beside = Shelves(shelf, shelf)
    served = _served(stores, shelves(block_names.content, host.names.content), of_beside)
    return BlockStore(
        stores.tiers,
        names,
        blocks,
        block_names.content,
        evictions,
        served=served,
        beside=beside,
        on_host=lambda slot, content, is_beside: bool(
            (host.beside[0].content if is_beside else host.names.content)[slot - host.first] == content
        ),
    )


def _served(stores: OpenStores, named: Shelves, beside: Shelves | None) -> BlocksServed | None:
    """Return what peers can get of blocks in memory and in the folder; None: no peers are served."""
    if stores.listening is None:
        return None
    asked: list[Shelf] = [*named, *(beside or ()), *([] if stores.folder is None else [stores.folder])]
    return BlocksServed(named, PeerServer(*stores.listening, asked), beside)


class WithOrders:
    """An engine whose orders are given to the store after each step, before the step's results are reported.

    So a client that then requests the blocks of a finished request from a peer finds them.
    """

    def __init__(self, engine: Engine, core: EngineCore, store: StoreThread) -> None:
        self._engine, self._core, self._store = engine, core, store

    @property
    def has_work(self) -> bool:
        """See the engine's method."""
        return self._engine.has_work

    @property
    def has_unfinished(self) -> bool:
        """See the engine's method."""
        return self._engine.has_unfinished

    def count_waiting(self) -> tuple[int, int]:
        """See the engine's method."""
        return self._engine.count_waiting()

    def step(self, inbox: Sequence[tuple[int, EngineInput]], now_ns: int) -> Sequence[AddressedMessage]:
        """Run a step, and give its orders to the store."""
        messages = self._engine.step(inbox, now_ns)
        self._store.put(self._core.take_orders())
        return messages


def with_orders(engine: Engine, core: EngineCore, store: StoreThread | None) -> Engine:
    """Return the engine with its orders given to the store, or the engine itself if there is no store."""
    return engine if store is None else WithOrders(engine, core, store)


class StartedEngine(NamedTuple):
    """An engine ready to run, with its executor and IO thread."""

    engine: Engine
    executor: Executor
    io: IOThread  # bound, not yet running
    turn: Callable[[int], None]  # called at the end of each round of the loop
    store: StoreThread | None
    scheduler: SchedulerInterface  # the engine's
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
    updates = executor if isinstance(executor, UpdatesWeights) else None
    io = IOThread(bound.context, bound.router, served, preparers, adapters=adapters, updates=updates)
    if isinstance(executor, MortalExecutor):
        executor.follow(io.put_news)
    stores = open_stores(config, executor)
    may_wait = config.scheduler_cls != BUILT_IN_SCHEDULER
    waits = image_waits(features, config.max_num_encoder_input_tokens, has_parts=not may_wait)
    box = BlackBox(
        start.black_box_fd,
        config.max_num_seqs,
        start.epoch,
        warm_up_ns,
        waits=waits,
        may_wait=may_wait,
    )
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
        return StartedEngine(
            with_orders(core, core, store), executor, io, box.turn, store, core.scheduler, lambda: None
        )
    captured = CapturedEngine(
        config, executor, writer, start.epoch, watchers=[box], received=io.inbox.received_ns, copies_early=True
    )
    core = captured.engine
    box.watch(core.scheduler)
    store = start_store(stores, executor, core, io.put_news)
    return StartedEngine(
        with_orders(captured, core, store), executor, io, box.turn, store, core.scheduler, writer.close
    )


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
