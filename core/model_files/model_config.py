"""read_model_config: reads the ModelConfig of a model folder or a .gguf file, and checks all of it."""

import json
from pathlib import Path

import msgspec

from core.model_files.gguf.config_gguf import read_gguf_config
from core.model_files.gguf.gguf_grid import grid_row, with_grid
from core.model_files.gguf.gguf_vision import read_gguf_vision
from core.model_files.settings.config_json import read_json_config
from core.model_files.settings.text_part import TEXT_PARTS
from core.models.architectures.by_name import FORMS
from core.models.architectures.encoder_architectures import ENCODER_FORMS
from core.models.architectures.vision_architectures import VISION_ARCHITECTURES
from core.models.config import ModelConfig
from ipc.errors import UnsupportedModelError
from ipc.files.projector import projector_of

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig", "is_foreign", "read_model_config", "refuse_missing_parts"]

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
    if projector is None:
        return config
    if (row := grid_row(projector)) is None:
        return msgspec.structs.replace(config, vision=read_gguf_vision(projector))
    parts, axes = with_grid(config, path, projector, row)
    return msgspec.structs.replace(config, vision=parts, rope_axes=axes)


def _architectures(path: Path) -> list[str]:
    """Return the architectures named by the model folder's config.json, or none if the file cannot be read."""
    try:
        names = json.loads((path / "config.json").read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    return list(map(str, names)) if isinstance(names, list) else []


def is_foreign(path: Path) -> bool:
    """Return whether the model folder's config.json names only architectures that are not in-tree.

    It is False for unreadable files: the in-tree reader reports their errors.
    """
    names = _architectures(path)
    return bool(names) and not set(names) & set(SUPPORTED_ARCHITECTURES)


_INDEXER = "sparse attention, in which an indexer chooses the tokens that a query sees"
_ENCODER = "the vision encoder that its files have, and"
_CHANNELS = "delta attention with a decay for each channel"
#: Architectures that neither our code nor our use of transformers' code runs -> what they need that is missing.
MISSING_PARTS: dict[str, str] = {
    "DeepseekV32ForCausalLM": _INDEXER,
    "DeepseekV4ForCausalLM": f"hyper-connections, and {_INDEXER}",
    "GlmMoeDsaForCausalLM": _INDEXER,
    "Glm5NextForConditionalGeneration": f"hyper-connections, {_CHANNELS}, and {_INDEXER}",
    "KimiLinearForCausalLM": _CHANNELS,
    "BailingHybridForCausalLM": _CHANNELS,
    "MiniMaxForCausalLM": "lightning attention",
    "MiniMaxM3VLForCausalLM": _INDEXER,
    "MiniMaxM3SparseForConditionalGeneration": _INDEXER,
    "Qwen4ExpForCausalLM": f"hyper-connections, tables of n-grams, and {_INDEXER}",
    "Qwen4ExpForConditionalGeneration": f"hyper-connections, tables of n-grams, and {_INDEXER}",
    "HYV4ForCausalLM": f"hyper-connections, and {_INDEXER}",
    "HYV4VLForConditionalGeneration": f"hyper-connections, and {_INDEXER}",
    "ZayaForCausalLM": "attention whose queries and keys come from a convolution over tokens",
    "InklingForCausalLM": "scores of attention that depend on distances, and convolutions over keys and values",
    "InklingForConditionalGeneration": "scores of attention that depend on distances, and encoders of images and audio",
    "Kimi_K25ForConditionalGeneration": f"{_ENCODER} latent attention under its names",
    "Step3p7ForConditionalGeneration": f"{_ENCODER} layers with other numbers of heads",
    "MuseGlimmerForConditionalGeneration": f"{_ENCODER} normalised embeddings",
    "DiffusionGemmaForBlockDiffusion": "decoding of whole blocks by diffusion",
}


#: Names of assistants in config.json's architectures -> that of the architecture of their layers.
ASSISTANTS = {
    "Gemma4AssistantForCausalLM": "Gemma4ForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM": "Gemma4UnifiedForCausalLM",
}


def refuse_missing_parts(path: Path) -> None:
    """Refuse an architecture by the name of what it needs. Errors: UnsupportedModelError."""
    for name in _architectures(path):
        if name in ASSISTANTS:
            raise UnsupportedModelError(
                f"{path}: {name} drafts for another model: name that one, and this in speculative_config, as "
                '{"method": "mtp", "model": PATH}'
            )
        if name in MISSING_PARTS:
            raise UnsupportedModelError(f"{path}: {name} needs {MISSING_PARTS[name]}, which this version does not have")
