"""EngineConfig: all options of an engine process. It is frozen, validated once, and itself a message."""

from typing import Annotated, Literal, TypeVar

import msgspec

from ipc.errors import ConfigError
from ipc.log_lines import LogFormat
from ipc.options import config_checks as checks
from ipc.options.block_stores import STORE_OPTIONS, KVTransferConfig
from ipc.options.devices import check_device
from ipc.options.model_options import ModelOptions
from ipc.options.option import Option, declared_options
from ipc.options.schedulers import BUILT_IN_SCHEDULER, check_scheduler
from ipc.options.speculation import SpeculativeConfig

SchedulingPolicy = Literal["fcfs", "priority", "fair"]
PreemptionMode = Literal["recompute", "swap", "auto", "by_choices"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
KVCacheDtype = Literal["auto", "int8", "fp8"]


class EngineConfig(ModelOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one engine. None means that the engine decides at its start, or that the option is off.

    The engine's decisions are in a ResolvedConfig (ipc/options/resolved.py).

    Errors: ConfigError that names the option and what is allowed.
    """

    max_num_seqs: Annotated[
        int | None,
        Option(
            "scheduling",
            "requests that run at the same time; default: 32, on a GPU 256 to 1024 by its memory",
            1,
            65_536,
            flags=("-np", "--parallel", "--max-running-requests"),
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "scheduling",
            "token budget of a step; default: 512, on a GPU 4096 or 8192 by its memory; with whole prompts at least "
            "max_model_len",
            1,
            2**24,
        ),
    ] = None
    block_size: Annotated[
        int, Option("KV cache", "tokens in a KV block, a power of two up to 128", 1, 128, flags=("--page-size",))
    ] = 16
    kv_cache_memory_bytes: Annotated[
        int | None,
        Option(
            "KV cache",
            "size of the KV cache, in bytes or as 512M, 2G; default: a quarter of the memory, at most 4G",
            1,
            2**44,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Option(
            "KV cache",
            "auto = the model's type, int8 = 8 bits and a scale for each row, on a GPU also fp8 = e4m3 without scales "
            "(both change tokens)",
        ),
    ] = "auto"
    num_blocks_override: Annotated[
        int | None,
        Option(
            "KV cache",
            "exact number of KV blocks, regardless of memory",
            2,
            2**30,
            names=("num_gpu_blocks_override", "num_gpu_blocks"),
        ),
    ] = None
    kv_host_bytes: Annotated[
        int, Option("KV cache", "host memory for blocks that the KV cache evicts, as 512M, 2G; 0 = none", 0, 2**44)
    ] = 0
    num_host_blocks: Annotated[
        int | None, Option("KV cache", "exact number of KV blocks in that memory; default: as many as fit", 0, 2**30)
    ] = None
    kv_dir: Annotated[str | None, Option("KV cache", "folder of files with KV blocks; needs kv_host_bytes")] = None
    kv_dir_bytes: Annotated[
        int,
        Option(
            "KV cache",
            "total size of these files, as 512M, 2G; the least recently used are removed first",
            2**20,
            2**50,
        ),
    ] = 32 << 30
    kv_listen: Annotated[
        str | None, Option("KV cache", "address from which other engines fetch KV blocks", metavar="ADDRESS")
    ] = None
    kv_peers: Annotated[
        str | None, Option("KV cache", "engines to fetch KV blocks from, by their kv_listen", metavar="ADDRESSES")
    ] = None
    kv_key_file: Annotated[
        str | None, Option("KV cache", "key file of `engine-core keys blocks`, the same at all peers")
    ] = None
    kv_transfer_config: Annotated[
        KVTransferConfig | None,
        Option(
            "KV cache",
            'store of KV blocks of an installed package, a JSON object: {"kv_connector": NAME, "kv_role": "kv_both", '
            '"kv_connector_extra_config": {...}} (docs/scale_out.md)',
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, Option("KV cache", "reuse the KV blocks of equal prefixes")] = True
    max_pinned_share: Annotated[
        float, Option("KV cache", "share of the KV blocks that pinned prompts may hold; 0 = none", 0, 0.9)
    ] = 0.5
    max_tenant_pinned_share: Annotated[
        float, Option("KV cache", "share of the KV blocks that the pinned prompts of one tenant may hold", 0, 0.9)
    ] = 0.25
    disable_cascade_attn: Annotated[
        bool,
        Option("KV cache", "read KV blocks that requests have in common for each of them; no token changes"),
    ] = False
    scheduler_cls: Annotated[
        str,
        Option(
            "scheduling",
            "scheduler: default, an installed plug-in's name, or MODULE:NAME (docs/schedulers.md)",
            metavar="NAME",
        ),
    ] = BUILT_IN_SCHEDULER
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Option(
            "scheduling",
            "order of requests: by arrival, by priority, or by the tokens that each client has received",
            names=("policy",),
            flags=("--schedule-policy",),
        ),
    ] = "fcfs"
    priority_aging_seconds: Annotated[
        float, Option("scheduling", "policy priority: waiting this long counts as one priority; 0 = never", 0, 1e6)
    ] = 0.0
    fair_quantum: Annotated[
        int, Option("scheduling", "policy fair: tokens that a client may be ahead of a waiting one", 0, 2**40)
    ] = 4096
    client_weights: Annotated[
        dict[str, float],
        Option(
            "scheduling",
            "policy fair: share of the clients with this name; others have 1; may be repeated",
            flags=("--client-weight",),
        ),
    ] = msgspec.field(default_factory=dict)
    preemption_mode: Annotated[
        PreemptionMode,
        Option(
            "preemption",
            "preempted requests: compute again, copy to the host and back, or the cheaper of both; by_choices = copy "
            "if its request has several choices (n), else compute again",
        ),
    ] = "recompute"
    swap_space_bytes: Annotated[
        int,
        Option(
            "preemption", "host memory for preempted requests, in bytes or as 512M, 2G; unused with recompute", 0, 2**44
        ),
    ] = 2**30
    num_swap_blocks: Annotated[
        int | None,
        Option(
            "preemption",
            "exact number of KV blocks in that memory; default: as many as fit",
            0,
            2**30,
            names=("num_cpu_blocks",),
        ),
    ] = None
    recompute_ns_per_token: Annotated[
        int | None,
        Option("preemption", "cost of computing a token again; default: measured at the start if needed", 1, 10**12),
    ] = None
    swap_ns_per_block: Annotated[
        int | None,
        Option(
            "preemption",
            "cost of copying a block to the host; default: measured at the start if needed",
            1,
            10**12,
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, Option("scheduling", "prompts share steps with decoding; no = whole prompts, in separate steps")
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        Option(
            "scheduling", "most tokens of a prompt in one step while there are other requests; 0 = no limit", 0, 2**20
        ),
    ] = 0
    max_num_partial_prefills: Annotated[
        int, Option("scheduling", "prompts that may be partly computed at the same time; 0 = no limit", 0, 65_536)
    ] = 0
    max_num_encoder_input_tokens: Annotated[
        int | None,
        Option("scheduling", "most tokens of images that a step encodes; default: one image", 0, 2**20),
    ] = None
    encoder_cache_size: Annotated[
        int | None,
        Option("scheduling", "tokens of images whose embeddings are kept; default: 256 MiB of them", 0, 2**31 - 1),
    ] = None
    scheduler_delay_factor: Annotated[
        float,
        Option(
            "scheduling",
            "delay prompts by this factor of the duration of the last step with prompts",
            0,
            1e6,
            names=("delay_factor",),
        ),
    ] = 0.0
    admission_lookahead: Annotated[
        int, Option("scheduling", "how many requests may start before an older one that does not fit", 0, 4096)
    ] = 8
    watermark: Annotated[
        float,
        Option("scheduling", "share of the KV blocks that starting a request leaves free while others run", 0, 0.5),
    ] = 0.01
    reserve_full_length: Annotated[
        bool, Option("scheduling", "start a request only if all the KV blocks that it can ever need are free")
    ] = False
    max_num_queued_requests: Annotated[
        int, Option("clients", "most requests of all clients that may wait to begin; more are refused", 1, 2**24)
    ] = 65_536
    max_num_queued_tokens: Annotated[int, Option("clients", "most tokens of those requests", 1, 2**32)] = 2**26
    max_client_bytes: Annotated[
        int, Option("clients", "memory of one client's unfinished requests, in bytes or as 512M, 2G", 1, 2**40)
    ] = 2**28
    client_lease_ms: Annotated[
        int, Option("clients", "end a client's session after this many milliseconds of silence", 100, 2**31)
    ] = 30_000
    request_metrics: Annotated[
        bool,
        Option("clients", "measure the times of requests for Prometheus; `serve --metrics` and `--http` set it"),
    ] = False
    log_requests: Annotated[
        bool, Option("log", "log a line for each request at its end, without prompt and answer")
    ] = False
    log_format: Annotated[
        LogFormat, Option("log", "format of the log on standard error: for people or for programs")
    ] = "text"
    capture: Annotated[
        str | None,
        Option(
            "capture",
            "record every request and decision in this new file, for `engine-core replay`; it contains all prompts",
        ),
    ] = None
    capture_rotate_bytes: Annotated[
        int,
        Option(
            "capture", "start a new file FILE-2, FILE-3, ... after this many bytes, as 512M, 2G; 0 = never", 0, 2**50
        ),
    ] = 0
    capture_keep_files: Annotated[
        int, Option("capture", "number of these files to keep, the last ones; 0 = all", 0, 2**20)
    ] = 0
    flight_recorder_bytes: Annotated[
        int,
        Option(
            "capture",
            "size of the in-memory flight recorder, as 64M; if the engine dies, it is written to a file without "
            "prompts and answers; 0 = off",
            0,
            2**32,
        ),
    ] = 2**24
    flight_recorder_seconds: Annotated[
        int,
        Option("capture", "the file covers at least this many last seconds, if they fit into that memory", 1, 2**20),
    ] = 60
    flight_recorder_folder: Annotated[
        str | None,
        Option("capture", "folder of those files; default: $XDG_STATE_HOME/engine-core or ~/.local/state/engine-core"),
    ] = None
    flight_recorder_contents: Annotated[
        bool, Option("capture", "keep prompts and answers in those files, as --capture does")
    ] = False
    max_logprobs: Annotated[
        int, Option("log probabilities", "most that a request may ask for at each position; -1 = any number", -1, 2**24)
    ] = 20
    logprobs_mode: Annotated[
        LogprobsMode,
        Option(
            "log probabilities",
            "logarithms or logits; raw: the model's, processed: those that the sampler draws from",
        ),
    ] = "raw_logprobs"
    speculative_config: Annotated[
        SpeculativeConfig | None,
        Option(
            "speculation",
            'speculative decoding, a JSON object: {"method": "ngram", "num_speculative_tokens": 7}; no token changes',
        ),
    ] = None
    kv_window: Annotated[
        int | None,
        Option("KV cache", "length of the sliding window in tokens; 0 = all; default: the model's", 0, 2**24),
    ] = None
    kv_page_blocks: Annotated[int | None, Option("KV cache", "KV blocks in a page; 0 = no pages", 0, 1024)] = None

    @property
    def num_host_slots(self) -> int:
        """Return the blocks of the host pool: first those for preempted requests, then those for evicted blocks."""
        return (self.num_swap_blocks or 0) + (self.num_host_blocks or 0)

    @property
    def kv_stores(self) -> list[str]:
        """Return the options that name a store of KV blocks beyond the host's memory."""
        return [name for name in STORE_OPTIONS if getattr(self, name) is not None]

    @property
    def asks_kv_store(self) -> bool:
        """Return whether requests may find blocks in a store: an engine that only sends its own blocks to peers has
        none to ask.
        """
        settings = self.kv_transfer_config
        return self.kv_dir is not None or self.kv_peers is not None or (settings is not None and settings.loads)

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            declared.check(getattr(self, name))
        checks.check_texts(self.capture, self.flight_recorder_folder, self.generation_config)
        checks.check_flight_recorder(self.flight_recorder_bytes)
        checks.check_weights(self.client_weights)
        checks.check_executor(self.executor, self.executor_options)
        check_scheduler(self.scheduler_cls, self.capture_rotate_bytes)
        check_device(self.device, self.executor, checks.BUILT_IN_EXECUTORS)
        checks.check_model(self.model)
        checks.check_mmproj(self.mmproj)
        checks.check_media(self.limit_mm_per_prompt)
        checks.check_numbers_by_name("override_generation_config", self.override_generation_config)
        checks.check_chat_template(self.chat_template)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two from 1 to 128; got {self.block_size}")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                "long_prefill_token_threshold divides prompts, which enable_chunked_prefill=false forbids"
            )
        _check_workers(self)
        _check_kv_tiers(self)
        _check_overlap(self)
        checks.check_adapters(self.enable_lora, self.lora_modules)
        _check_speculation(self)


def _check_kv_tiers(config: EngineConfig) -> None:
    """Check the options of stores of evicted KV blocks, not whether folder, key and peers exist.

    Errors: ConfigError.
    """
    has_host = bool(config.kv_host_bytes or config.num_host_blocks)
    if has_host and not config.enable_prefix_caching:
        raise ConfigError("kv_host_bytes keeps blocks of the prefix cache, but enable_prefix_caching is false")
    checks.check_store_names(config.kv_dir, config.kv_key_file, config.kv_listen, config.kv_peers)
    checks.check_connector(config.kv_transfer_config, config.kv_key_file)
    for name in config.kv_stores:
        if not has_host:
            raise ConfigError(f"{name} needs blocks in the host's memory: also give kv_host_bytes")
        if config.executor not in checks.BUILT_IN_EXECUTORS:
            raise ConfigError(f"{name} is for executor='local'; got {config.executor!r:.80}")
        speculation = config.speculative_config
        if speculation is not None and speculation.runs_model and speculation.method != "mtp":
            raise ConfigError(
                f"{name} does not support the blocks of another model that drafts: leave out {name}, or use method "
                "'mtp', 'ngram' or 'suffix'"
            )


def _check_speculation(config: EngineConfig) -> None:
    """Check that this executor supports this kind of speculation. Errors: ConfigError."""
    settings, executor = config.speculative_config, config.executor
    if settings is None:
        return
    if config.device == "cuda" and settings.runs_model and config.async_scheduling:
        raise ConfigError(
            f"async_scheduling=true: speculative_config method={settings.method!r} needs each step's tokens before the "
            "next step: leave async_scheduling out"
        )
    if settings.runs_model and executor != "local":
        raise ConfigError(f"executor={executor!r} has no draft model; use executor='local'")


def _check_overlap(config: EngineConfig) -> None:
    """Check that an executor in this process can run a step while the next one is scheduled. Errors: ConfigError."""
    is_alone = config.executor == "local" and config.device == "cpu" and not _check_workers(config)
    if config.async_scheduling and is_alone:
        raise ConfigError(
            "async_scheduling=true needs an executor that overlaps: device=cuda or distributed_executor_backend=mp"
        )


def _check_workers(config: EngineConfig) -> bool:
    """Return whether there are worker processes. Errors: ConfigError for an executor that cannot run in that many."""
    backend, executor, sizes = config.distributed_executor_backend, config.executor, _given_sizes(config)
    if backend == "ray" and config.device != "cpu":
        raise ConfigError(f"distributed_executor_backend='ray' is for device='cpu'; got {config.device!r}")
    _check_nodes(config)
    if not sizes:
        return backend in SEPARATE
    name, size = sizes[0]
    if backend == "uni":
        raise ConfigError(
            f"{name}={size} needs worker processes: leave distributed_executor_backend out, or set it to 'mp'"
        )
    if executor not in checks.BUILT_IN_EXECUTORS:
        raise ConfigError(f"{name}={size} is for executor='local'; got executor={executor!r:.80}")
    return True


def _check_nodes(config: EngineConfig) -> None:
    """Check the options of several machines. Errors: ConfigError."""
    address = config.master_addr
    if address is not None and (not isinstance(address, str) or not address):
        raise ConfigError(f"master_addr must be a host, HOST:PORT or a tcp:// address; got {address!r:.80}")
    if config.nnodes == 1:
        return
    count = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.nnodes > count:
        raise ConfigError(
            f"nnodes={config.nnodes} is more than the {count} workers of tensor_parallel_size and "
            f"pipeline_parallel_size: give pipeline_parallel_size={config.nnodes}, or fewer nodes"
        )
    if address is None and config.distributed_executor_backend != "ray":
        raise ConfigError(
            f"nnodes={config.nnodes} needs master_addr, the address at which other machines join: a host name of this "
            "one"
        )


def _given_sizes(config: EngineConfig) -> list[tuple[str, int]]:
    """Return the names and values of the sizes above 1, which need several workers."""
    names = "tensor_parallel_size", "pipeline_parallel_size"
    return [(name, size) for name in names if (size := getattr(config, name)) > 1]


#: Backends whose executors run in other processes.
SEPARATE = ("mp", "ray")
#: An EngineConfig, or a resolved one (ipc/options/resolved.py).
Config = TypeVar("Config", bound=EngineConfig)
#: Every option by name, in the order of the fields.
OPTIONS = declared_options(EngineConfig)
