"""read_model_config: reads the ModelConfig of a model folder or a .gguf file, and checks all of it."""

import json
from pathlib import Path

import msgspec

from core.model_files.gguf.config_gguf import read_gguf_config
from core.model_files.gguf.gguf_vision import read_gguf_vision
from core.model_files.settings.config_json import read_json_config
from core.model_files.settings.text_part import TEXT_PARTS
from core.models.architectures.by_name import FORMS
from core.models.architectures.encoder_architectures import ENCODER_FORMS
from core.models.architectures.vision_architectures import VISION_ARCHITECTURES
from core.models.config import ModelConfig
from ipc.files.projector import projector_of

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig", "is_foreign", "read_model_config"]

SUPPORTED_ARCHITECTURES = (*FORMS, *ENCODER_FORMS, *VISION_ARCHITECTURES, *TEXT_PARTS)


def read_model_config(path: Path, mmproj: str | None = None) -> ModelConfig:
    """Return a model's configuration, with the vision encoder of a GGUF file's projector (see projector_of()).

    path: a model folder or .gguf file, from ipc.files.model_files.resolve_model. mmproj: the projector's path; None =
    the one next to the file.

    Errors: ModelFileError naming the key for a missing or invalid value; UnsupportedModelError naming an unsupported
    feature.
    """
    projector = projector_of(path, mmproj)
    if path.suffix != ".gguf":
        return read_json_config(path)
    config = read_gguf_config(path)
    return config if projector is None else msgspec.structs.replace(config, vision=read_gguf_vision(projector))


def is_foreign(path: Path) -> bool:
    """Return whether the model folder's config.json names only architectures that are not in-tree.

    It is False for unreadable files: the in-tree reader reports their errors.
    """
    try:
        names = json.loads((path / "config.json").read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(names, list) and bool(names) and not set(map(str, names)) & set(SUPPORTED_ARCHITECTURES)
