"""Checks of options that are no plain choices or numbers (names, paths, weights), or that depend on others."""

from typing import TYPE_CHECKING

from ipc.errors import ConfigError
from ipc.options.block_stores import addresses_of, stores_of

if TYPE_CHECKING:
    from ipc.options.config import EngineConfig

#: Executors that are no plug-ins.
BUILT_IN_EXECUTORS = ("local", "fake")
#: Why distributed_executor_backend has no "ray".
NOT_BY_RAY = (
    "the workers of an engine live and die with it, by pipes, on its machine; Ray places engines: engine-core ray, "
    "engine_core.ray.deploy() (docs/scale_out.md)"
)
_MIN_WEIGHT, _MAX_WEIGHT = 1e-3, 1e3
#: Least size of a flight recorder that is on: two halves, each with a header and a small checkpoint.
MIN_FLIGHT_BYTES = 1 << 16
_MAX_EXECUTOR_LENGTH = 128
_MAX_MODEL_BYTES = 4096  # Linux' PATH_MAX


def check_weights(weights: object) -> None:
    """Check the weights of clients by their names. Errors: ConfigError."""
    if not isinstance(weights, dict) or not all(isinstance(name, str) and name for name in weights):
        raise ConfigError(f"client_weights must be a dict of client names and weights; got {weights!r:.80}")
    for name, weight in weights.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
            raise ConfigError(
                f"client_weights: the weight of {name!r:.80} must be a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}; "
                f"got {weight!r:.80}"
            )


def check_model(model: object) -> None:
    """Check what names a model, not whether it is there. Errors: ConfigError."""
    if model is None:
        return
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be a model folder, a .gguf file or a Hugging Face name; got {model!r:.80}")
    if any("\ud800" <= character <= "\udfff" for character in model) or "\0" in model:
        raise ConfigError(f"model must be valid UTF-8 without NUL; got {model!r:.80}")
    if (size := len(model.encode())) > _MAX_MODEL_BYTES:
        raise ConfigError(f"model must be at most {_MAX_MODEL_BYTES} bytes long; got {size}, beginning {model!r:.80}")


def check_chat_template(template: object) -> None:
    """Check that it may be a file or a template; whether it is one shows when it is read. Errors: ConfigError."""
    if template is not None and (not isinstance(template, str) or not template or "\0" in template):
        raise ConfigError(f"chat_template must be the path of a file, or a template; got {template!r:.80}")


def check_mmproj(mmproj: object) -> None:
    """Check what names a projector, not whether it is there. Errors: ConfigError."""
    if mmproj is not None and (not isinstance(mmproj, str) or not mmproj or "\0" in mmproj):
        raise ConfigError(f"mmproj must be the path of a .gguf file; got {mmproj!r:.80}")


def check_executor(name: object, options: object) -> None:
    """Check what names an executor, not whether it is there, and its own options. Errors: ConfigError."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _MAX_EXECUTOR_LENGTH:
        raise ConfigError(f"executor must be 'local', 'fake' or the name of a plug-in; got {name!r:.80}")
    if not isinstance(options, dict) or not all(isinstance(word, str) for pair in options.items() for word in pair):
        raise ConfigError(f"executor_options must be a dict of texts; got {options!r:.80}")
    if options and name in BUILT_IN_EXECUTORS:
        raise ConfigError(f"executor_options are a plug-in's, and executor={name!r} has none: {', '.join(options)}")


def check_texts(capture: object, flight_recorder_folder: object, generation_config: object) -> None:
    """Check what names files and folders, not whether they are there. Errors: ConfigError."""
    if capture is not None and not (isinstance(capture, str) and capture):
        raise ConfigError(f"capture must be the path of a file to write; got {capture!r}")
    if flight_recorder_folder is not None and not (isinstance(flight_recorder_folder, str) and flight_recorder_folder):
        raise ConfigError(f"flight_recorder_folder must be the path of a folder; got {flight_recorder_folder!r}")
    if not isinstance(generation_config, str) or not generation_config:
        raise ConfigError(
            f"generation_config must be 'auto', 'vllm' or the path of a folder; got {generation_config!r}"
        )


def check_kv_tiers(config: "EngineConfig", *, has_workers: bool) -> None:
    """Check the options of what keeps evicted KV blocks, not whether folder, key and peers are there. Errors:
    ConfigError.
    """
    has_host = bool(config.kv_host_bytes or config.num_host_blocks)
    if has_host and not config.enable_prefix_caching:
        raise ConfigError("kv_host_bytes keeps blocks of the prefix cache, and enable_prefix_caching is false")
    _check_kv_names(config)
    for name in stores_of(config):
        if not has_host:
            raise ConfigError(f"{name} is behind the host's memory, of which there is none: give kv_host_bytes, too")
        if config.executor not in BUILT_IN_EXECUTORS or config.device != "cpu":
            raise ConfigError(
                f"{name} is for executor='local' on device='cpu'; got {config.executor!r:.80} on {config.device!r}"
            )
        if has_workers:
            raise ConfigError(f"{name} reads and writes blocks of the engine process: leave out the workers, or {name}")
        speculation = config.speculative_config
        if speculation is not None and (speculation.runs_model or speculation.runs_head):
            raise ConfigError(f"{name} has no blocks of a model that drafts: leave out {name}, or take method='ngram'")


def _check_kv_names(config: "EngineConfig") -> None:
    for name, what in (("kv_dir", "a folder"), ("kv_key_file", "a file")):
        path = getattr(config, name)
        if path is not None and (not isinstance(path, str) or not path or "\0" in path):
            raise ConfigError(f"{name} must be the path of {what}; got {path!r:.80}")
    for name in ("kv_listen", "kv_peers"):
        address = getattr(config, name)
        if address is None:
            continue
        if not isinstance(address, str) or not addresses_of(address):
            raise ConfigError(f"{name} must be an address, such as ipc:///run/user/1000/kv.sock; got {address!r:.80}")
        if config.kv_key_file is None:
            raise ConfigError(
                f"{name} needs kv_key_file, by which peers name blocks: make one with `engine-core keys blocks FILE`, "
                "and give all of them the same"
            )


def check_flight_recorder(num_bytes: int) -> None:
    """Check the size of the flight recorder. Errors: ConfigError."""
    if 0 < num_bytes < MIN_FLIGHT_BYTES:
        raise ConfigError(f"flight_recorder_bytes must be 0, or at least {MIN_FLIGHT_BYTES}; got {num_bytes}")


def check_speculation(config: "EngineConfig") -> None:
    """Check that this executor can guess tokens in this way. Errors: ConfigError."""
    settings, executor = config.speculative_config, config.executor
    if settings is None:
        return
    if executor == "local" and config.device == "cuda" and settings.runs_model:
        raise ConfigError(
            f"speculative_config: method={settings.method!r} runs on device=cpu only: its drafts are computed by the C "
            "kernels or beside them; on device=cuda take method='ngram' or 'suffix'"
        )
    if settings.runs_model and executor != "local":
        raise ConfigError(f"executor={executor!r} runs no model that drafts; use executor='local'")
    if settings.runs_head and (sizes := given_sizes(config)):
        raise ConfigError(
            f"speculative_config: method={settings.method!r} reads the whole model's states and embeddings, "
            f"of which each of several workers has a part: leave {sizes[0][0]} out"
        )


def check_overlap(config: "EngineConfig") -> None:
    """Check that an executor in this process can run a step while the next one is scheduled. Errors: ConfigError."""
    is_alone = config.executor == "local" and config.device == "cpu" and not check_workers(config)
    if config.async_scheduling and is_alone:
        raise ConfigError(
            "async_scheduling=true needs an executor that overlaps: device=cuda or distributed_executor_backend=mp"
        )


def check_adapters(enable_lora: bool, modules: object, device: str) -> None:
    """Check the options of adapters, not whether their files are there. Errors: ConfigError."""
    if not isinstance(modules, dict) or not all(isinstance(word, str) and word for word in sum(modules.items(), ())):
        raise ConfigError(f"lora_modules must be a dict of names and paths; got {modules!r:.80}")
    if modules and not enable_lora:
        raise ConfigError(f"lora_modules loads adapters ({', '.join(modules)}), which needs enable_lora")
    if enable_lora and device == "cuda":
        raise ConfigError("enable_lora runs on device=cpu only: the GPU's steps have no adapters yet; leave it out")


def given_sizes(config: "EngineConfig") -> list[tuple[str, int]]:
    """Return the names and values of the sizes above 1, which take several workers."""
    names = "tensor_parallel_size", "pipeline_parallel_size"
    return [(name, size) for name in names if (size := getattr(config, name)) > 1]


def check_workers(config: "EngineConfig") -> bool:
    """Return whether there are worker processes. Errors: ConfigError for an executor that cannot run in so many."""
    backend, executor, sizes = config.distributed_executor_backend, config.executor, given_sizes(config)
    if config.enable_lora and (backend == "mp" or sizes):
        raise ConfigError("enable_lora runs in the engine's process only: leave out the workers, or enable_lora")
    _check_nodes(config, sizes)
    if not sizes:
        return backend == "mp"
    name, size = sizes[0]
    if backend == "uni":
        raise ConfigError(f"{name}={size} takes worker processes: leave distributed_executor_backend out, or give 'mp'")
    if executor not in BUILT_IN_EXECUTORS:
        raise ConfigError(f"{name}={size} is for executor='local'; got executor={executor!r:.80}")
    return True


def _check_nodes(config: "EngineConfig", sizes: list[tuple[str, int]]) -> None:
    """Check the options of several machines. Errors: ConfigError."""
    address = config.master_addr
    if address is not None and (not isinstance(address, str) or not address):
        raise ConfigError(f"master_addr must be a host, HOST:PORT or an address of ours; got {address!r:.80}")
    if config.nnodes == 1:
        return
    count = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.nnodes > count:
        raise ConfigError(
            f"nnodes={config.nnodes} is more than the {count} workers of tensor_parallel_size and "
            f"pipeline_parallel_size: give pipeline_parallel_size={config.nnodes}, or fewer nodes"
        )
    if address is None:
        raise ConfigError(f"nnodes={config.nnodes} needs master_addr, where other machines join: a host of this one")


def with_revision(model: object, revision: object) -> str:
    """Return the model's name with its revision. Errors: ConfigError for a model that has none, or has it already."""
    if not isinstance(model, str) or model.count("/") != 1 or "@" in model or not isinstance(revision, str):
        raise ConfigError(
            f"revision={revision!r:.80} needs a model of the Hugging Face Hub, org/name without a revision of its own; "
            f"got model={model!r:.80}"
        )
    return f"{model}@{revision}"
