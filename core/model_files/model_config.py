"""read_model_config: the ModelConfig of a model folder or a .gguf file, checked in full."""

from pathlib import Path

from core.model_files.config_gguf import read_gguf_config
from core.model_files.config_json import read_json_config
from core.model_files.text_part import TEXT_PARTS
from core.models.architectures import FORMS
from core.models.config import ModelConfig
from core.models.encoder_architectures import ENCODER_FORMS
from core.models.vision_architectures import VISION_ARCHITECTURES

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig", "read_model_config"]

SUPPORTED_ARCHITECTURES = (*FORMS, *ENCODER_FORMS, *VISION_ARCHITECTURES, *TEXT_PARTS)


def read_model_config(path: Path) -> ModelConfig:
    """Return the configuration of a model. path: a model folder or .gguf file, of ipc.files.model_files.resolve_model.

    Errors: ModelFileError naming the key for a missing or invalid value; UnsupportedModelError naming what this version
    cannot run.
    """
    return read_gguf_config(path) if path.suffix == ".gguf" else read_json_config(path)
