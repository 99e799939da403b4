"""projector_beside: the GGUF file with the vision encoder of a model in a GGUF file, which llama.cpp calls mmproj.

llama.cpp's converter writes two files. The one with "mmproj" in its name lies beside the model's, as downloads put it.
It belongs to the model if their sizes fit, and the model's vocabulary has the token that stands for images.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from ipc.errors import ModelFileError
from ipc.files.gguf import GgufValue, read_gguf


class ProjectorKind(NamedTuple):
    """What llama.cpp's name of a projector says."""

    text: str  # general.architecture of the text's model
    mark: str  # the token that stands for a row of an image
    processor: str  # image_processor_type in preprocessor_config.json


#: The file of a model's folder that says how its images are prepared.
PROCESSOR_FILE = "preprocessor_config.json"
PROJECTOR_KINDS = {
    "gemma3": ProjectorKind("gemma3", "<image_soft_token>", "Gemma3ImageProcessor"),
    "idefics3": ProjectorKind("llama", "<image>", "Idefics3ImageProcessor"),
}


def projector_beside(path: Path) -> Path | None:
    """Return the first file by name that has the vision encoder of the model in `path`; None where there is none.

    Errors: those of read_gguf() for the model's file, and for one that is named as if it fitted.
    """
    if path.suffix != ".gguf":
        return None
    files = [file for file in sorted(path.parent.glob("*.gguf")) if "mmproj" in file.name.lower() and file != path]
    return next((file for file in files if _fits(file, path)), None)


def projector_kind(metadata: dict[str, GgufValue]) -> str:
    """Return llama.cpp's name of a projector; "" where the file has none."""
    return str(metadata.get("clip.vision.projector_type") or metadata.get("clip.projector_type") or "")


def processor_settings(file: Path) -> bytes:
    """Return what the model's preprocessor_config.json would say. Errors: ModelFileError; those of read_gguf()."""
    metadata = read_gguf(file).metadata
    side = metadata.get("clip.vision.image_size")
    longest = metadata.get("clip.vision.preproc_image_size")
    if not isinstance(side, int) or not isinstance(longest, int | None):
        raise ModelFileError(f"{file}: clip.vision.image_size and preproc_image_size must be numbers of pixels")
    settings: dict[str, Any] = {"image_processor_type": PROJECTOR_KINDS[projector_kind(metadata)].processor}
    if settings["image_processor_type"] == "Gemma3ImageProcessor":
        settings["size"] = {"height": side, "width": side}
    else:
        settings |= {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": longest or side}}
        settings["do_image_splitting"] = longest is not None
    return json.dumps(settings).encode()


def _fits(file: Path, path: Path) -> bool:
    metadata, model = read_gguf(file).metadata, read_gguf(path).metadata
    kind, text = PROJECTOR_KINDS.get(projector_kind(metadata)), model.get("general.architecture")
    tokens = model.get("tokenizer.ggml.tokens")
    if metadata.get("general.architecture") != "clip" or kind is None or text != kind.text:
        return False
    if metadata.get("clip.vision.projection_dim") != model.get(f"{text}.embedding_length"):
        return False
    return isinstance(tokens, list) and kind.mark in tokens
