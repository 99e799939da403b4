"""Checks of the options whose values are no plain choices or numbers: a model's name, and the weights of clients."""

from ipc.errors import ConfigError

_MIN_WEIGHT, _MAX_WEIGHT = 1e-3, 1e3
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
