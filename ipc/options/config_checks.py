"""Checks of options that are not plain choices or numbers: names, paths, weights."""

from ipc.errors import ConfigError
from ipc.options.block_stores import BUILT_IN_CONNECTORS, KVTransferConfig, addresses_of

#: Executors that are not plug-ins.
BUILT_IN_EXECUTORS = ("local", "fake")
_MIN_WEIGHT, _MAX_WEIGHT = 1e-3, 1e3
#: Least size of a flight recorder that is on: two halves, each with a header and a small checkpoint.
MIN_FLIGHT_BYTES = 1 << 16
_MAX_EXECUTOR_LENGTH = 128
_MAX_MEDIA = 4096
_MAX_MODEL_BYTES = 4096  # Linux' PATH_MAX


def check_weights(weights: object) -> None:
    """Check the clients' weights by name. Errors: ConfigError."""
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
    """Check the name of a model, not whether it exists. Errors: ConfigError."""
    if model is None:
        return
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be a model folder, a .gguf file or a Hugging Face name; got {model!r:.80}")
    if any("\ud800" <= character <= "\udfff" for character in model) or "\0" in model:
        raise ConfigError(f"model must be valid UTF-8 without NUL; got {model!r:.80}")
    if (size := len(model.encode())) > _MAX_MODEL_BYTES:
        raise ConfigError(f"model must be at most {_MAX_MODEL_BYTES} bytes long; got {size}, beginning {model!r:.80}")


def check_chat_template(template: object) -> None:
    """Check that it may be a file or a template; its content is checked when it is read. Errors: ConfigError."""
    if template is not None and (not isinstance(template, str) or not template or "\0" in template):
        raise ConfigError(f"chat_template must be the path of a file, or a template; got {template!r:.80}")


def check_mmproj(mmproj: object) -> None:
    """Check the name of a projector, not whether it exists. Errors: ConfigError."""
    if mmproj is not None and (not isinstance(mmproj, str) or not mmproj or "\0" in mmproj):
        raise ConfigError(f"mmproj must be the path of a .gguf file; got {mmproj!r:.80}")


def check_media(limits: object) -> None:
    """Check the most images, videos and audio of a prompt: of the latter two there are none. Errors: ConfigError."""
    if not isinstance(limits, dict) or not limits.keys() <= {"image", "video", "audio"}:
        raise ConfigError(f'limit_mm_per_prompt must be {{"image": N}}; got {limits!r:.80}')
    for kind, most in limits.items():
        if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= _MAX_MEDIA:
            raise ConfigError(
                f"limit_mm_per_prompt: {kind} must be an integer from 0 to {_MAX_MEDIA}; got {most!r:.80}"
            )


def check_numbers_by_name(option: str, numbers: object) -> None:
    """Check that an option is a dict of numbers, not which names and numbers are right. Errors: ConfigError."""
    if not isinstance(numbers, dict) or not all(
        isinstance(name, str) and isinstance(number, int | float) and not isinstance(number, bool)
        for name, number in numbers.items()
    ):
        raise ConfigError(f"{option} must be a dict of numbers by name; got {numbers!r:.80}")


def check_executor(name: object, options: object) -> None:
    """Check the name of an executor, not whether it exists, and its own options. Errors: ConfigError."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _MAX_EXECUTOR_LENGTH:
        raise ConfigError(f"executor must be 'local', 'fake' or the name of a plug-in; got {name!r:.80}")
    if not isinstance(options, dict) or not all(isinstance(word, str) for pair in options.items() for word in pair):
        raise ConfigError(f"executor_options must be a dict of texts; got {options!r:.80}")
    if options and name == "local":
        raise ConfigError(f"executor_options are for 'fake' and plug-ins; 'local' has none: {', '.join(options)}")


def check_texts(capture: object, flight_recorder_folder: object, generation_config: object) -> None:
    """Check the names of files and folders, not whether they exist. Errors: ConfigError."""
    if capture is not None and not (isinstance(capture, str) and capture):
        raise ConfigError(f"capture must be the path of a file to write; got {capture!r}")
    if flight_recorder_folder is not None and not (isinstance(flight_recorder_folder, str) and flight_recorder_folder):
        raise ConfigError(f"flight_recorder_folder must be the path of a folder; got {flight_recorder_folder!r}")
    if not isinstance(generation_config, str) or not generation_config:
        raise ConfigError(
            f"generation_config must be 'auto', 'vllm' or the path of a folder; got {generation_config!r}"
        )


def check_store_names(kv_dir: object, kv_key_file: object, kv_listen: object, kv_peers: object) -> None:
    """Check the names of stores of KV blocks and their key, not whether they exist. Errors: ConfigError."""
    for name, path, what in (("kv_dir", kv_dir, "a folder"), ("kv_key_file", kv_key_file, "a file")):
        if path is not None and (not isinstance(path, str) or not path or "\0" in path):
            raise ConfigError(f"{name} must be the path of {what}; got {path!r:.80}")
    for name, address in (("kv_listen", kv_listen), ("kv_peers", kv_peers)):
        if address is None:
            continue
        if not isinstance(address, str) or not addresses_of(address):
            raise ConfigError(f"{name} must be an address, such as ipc:///run/user/1000/kv.sock; got {address!r:.80}")
        _check_key(name, kv_key_file)


def check_connector(settings: object, kv_key_file: object) -> None:
    """Check kv_transfer_config, not whether its connector is installed. Errors: ConfigError."""
    if settings is None:
        return
    if not isinstance(settings, KVTransferConfig) or settings.kv_connector in BUILT_IN_CONNECTORS:
        raise ConfigError(f"kv_transfer_config must name an installed connector; got {settings!r:.80}")
    _check_key("kv_transfer_config", kv_key_file)


def _check_key(name: str, kv_key_file: object) -> None:
    if kv_key_file is None:
        raise ConfigError(
            f"{name} needs kv_key_file, the key of block names: make one with `engine-core keys blocks FILE`, and "
            "give the same file to all engines that share blocks"
        )


def check_flight_recorder(num_bytes: int) -> None:
    """Check the size of the flight recorder. Errors: ConfigError."""
    if 0 < num_bytes < MIN_FLIGHT_BYTES:
        raise ConfigError(f"flight_recorder_bytes must be 0, or at least {MIN_FLIGHT_BYTES}; got {num_bytes}")


def check_adapters(enable_lora: bool, modules: object) -> None:
    """Check the options of adapters, not whether their files exist. Errors: ConfigError."""
    if not isinstance(modules, dict) or not all(isinstance(word, str) and word for word in sum(modules.items(), ())):
        raise ConfigError(f"lora_modules must be a dict of names and paths; got {modules!r:.80}")
    if modules and not enable_lora:
        raise ConfigError(f"lora_modules loads adapters ({', '.join(modules)}), which needs enable_lora")


def with_revision(model: object, revision: object) -> str:
    """Return the model's name with its revision. Errors: ConfigError for a model that cannot have one, or already has
    one.
    """
    if not isinstance(model, str) or model.count("/") != 1 or "@" in model or not isinstance(revision, str):
        raise ConfigError(
            f"revision={revision!r:.80} needs a model of the Hugging Face Hub, org/name without a revision of its own; "
            f"got model={model!r:.80}"
        )
    return f"{model}@{revision}"
