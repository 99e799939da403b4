"""Checks of the options whose values are no plain choices or numbers: names of models and executors, weights."""

from ipc.errors import ConfigError

#: Executors that are no plug-ins.
BUILT_IN_EXECUTORS = ("local", "fake")
_MIN_WEIGHT, _MAX_WEIGHT = 1e-3, 1e3
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


def check_executor(name: object, options: object) -> None:
    """Check what names an executor, not whether it is there, and its own options. Errors: ConfigError."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _MAX_EXECUTOR_LENGTH:
        raise ConfigError(f"executor must be 'local', 'fake' or the name of a plug-in; got {name!r:.80}")
    if not isinstance(options, dict) or not all(isinstance(word, str) for pair in options.items() for word in pair):
        raise ConfigError(f"executor_options must be a dict of texts; got {options!r:.80}")
    if options and name in BUILT_IN_EXECUTORS:
        raise ConfigError(f"executor_options are a plug-in's, and executor={name!r} has none: {', '.join(options)}")
