"""Default sampling: the parameters recommended by a model's own files, for requests without parameters.

A folder has them in generation_config.json, a GGUF file in the keys general.sampling.*. Clients receive them in the
message Welcome, so all clients of an engine have the same defaults, no matter which files they can read.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.model_files.settings.config_json import read_json_object
from ipc.errors import ConfigError, InvalidRequestError, ModelFileError
from ipc.files.gguf import read_gguf
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import NUMBERS, SamplingParams

_FILE = "generation_config.json"
_KEYS = {name: one.parameter.gguf for name, one in NUMBERS.items() if one.parameter.gguf}
#: Keys of generation_config.json -> parameters: those that vLLM uses, and those in GGUF files.
_JSON_KEYS = {**{name: name for name in _KEYS}, "max_new_tokens": "max_tokens"}
_GGUF_KEYS = {f"general.sampling.{key}": name for name, key in _KEYS.items()}


def read_default_sampling(config: EngineConfig) -> dict[str, float | int]:
    """Return the parameters selected by the options generation_config and override_generation_config, by their names in
    SamplingParams.

    Errors: ModelFileError for a file with invalid sampling parameters; ConfigError for a folder without the file, and
    for an override that is none of the parameters or that is out of range.
    """
    return {**_read_selected(config), **_overrides(config.override_generation_config)}


def _overrides(given: Mapping[str, float]) -> dict[str, float | int]:
    option = "override_generation_config"
    if unknown := given.keys() - _JSON_KEYS.keys():
        raise ConfigError(f"{option} takes {', '.join(sorted(_JSON_KEYS))}; got {', '.join(sorted(unknown))!r:.80}")
    parameters: dict[str, float | int] = {}
    for key, number in given.items():
        name = _JSON_KEYS[key]
        value: Any = int(number) if float(number).is_integer() else number
        try:
            parameters[name] = getattr(SamplingParams(**{name: value}), name)
        except InvalidRequestError as error:
            raise ConfigError(f"{option}: {error}") from None
    return parameters


def _read_selected(config: EngineConfig) -> dict[str, float | int]:
    if config.generation_config == "vllm":
        return {}
    if config.generation_config != "auto":
        path = Path(os.path.expanduser(config.generation_config)) / _FILE
        if not path.is_file():
            raise ConfigError(
                f"generation_config must be 'auto', 'vllm' or a folder with {_FILE}; got {config.generation_config!r}"
            )
        return _read_json(path)
    if config.executor == "fake" and config.model is None:
        return {}
    model = resolve_model(config.model)
    if model.suffix == ".gguf":
        metadata = read_gguf(model).metadata
        # GGUF's numbers are float32 with seven significant digits: 0.6 must not become 0.6000000238418579.
        values = {
            key: float(f"{value:.7g}") if isinstance(value, float) else value
            for key in _GGUF_KEYS
            if (value := metadata.get(key)) is not None
        }
        return _parameters(values, _GGUF_KEYS, model)
    return _read_json(model / _FILE) if (model / _FILE).is_file() else {}


def _read_json(path: Path) -> dict[str, float | int]:
    return _parameters(read_json_object(path), _JSON_KEYS, path)


def _parameters(values: Mapping[str, Any], names: Mapping[str, str], source: Path) -> dict[str, float | int]:
    parameters: dict[str, float | int] = {}
    for key, name in names.items():
        if (value := values.get(key)) is None:
            continue
        try:
            parameters[name] = getattr(SamplingParams(**{name: value}), name)
        except InvalidRequestError as error:
            raise ModelFileError(
                f"{source}: {key}: {error}; generation_config='vllm' starts the engine without these defaults"
            ) from None
    return parameters
