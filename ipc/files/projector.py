"""projector_of: the GGUF file with the vision encoder of a model in a GGUF file, which llama.cpp calls mmproj.

llama.cpp's converter writes two files. The one with "mmproj" in its name is next to the model's file, as downloads
place it, or at another path, which the option mmproj names.
It belongs to the model if their sizes fit, and the model's vocabulary has the token for images.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ipc.errors import ConfigError, ModelFileError
from ipc.files.gguf import GgufValue, gguf_tokens, read_gguf


class ProjectorKind(NamedTuple):
    """What follows from llama.cpp's name of a projector."""

    texts: tuple[str, ...]  # general.architecture of the text's models
    mark: str  # the token for a row of an image
    processor: str  # image_processor_type in preprocessor_config.json


#: The file in a model's folder with the preprocessing of its images.
PROCESSOR_FILE = "preprocessor_config.json"
_QWEN, _GEMMA4, _PIXTRAL = "Qwen2VLImageProcessor", "Gemma4ImageProcessor", "PixtralImageProcessor"
_LFM2, _INTERNVL = "Lfm2VlImageProcessor", "GotOcr2ImageProcessor"
#: Rows of an image of Gemma 4, which its files do not state.
POOLED_ROWS = 280
#: The fewest and the most pixels of an image in the processors of the published models, which files may not state.
_BOUNDS = {"qwen3vl_merger": (256 * 256, 4096 * 4096)}
_OTHER_BOUNDS = (56 * 56, 28 * 28 * 16384)
PROJECTOR_KINDS = {
    "gemma3": ProjectorKind(("gemma3",), "<image_soft_token>", "Gemma3ImageProcessor"),
    "idefics3": ProjectorKind(("llama",), "<image>", "Idefics3ImageProcessor"),
    "qwen2vl_merger": ProjectorKind(("qwen2vl",), "<|image_pad|>", _QWEN),
    "qwen2.5vl_merger": ProjectorKind(("qwen2vl",), "<|image_pad|>", _QWEN),
    "qwen3vl_merger": ProjectorKind(("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"), "<|image_pad|>", _QWEN),
    "gemma4v": ProjectorKind(("gemma4",), "<|image|>", _GEMMA4),
    "pixtral": ProjectorKind(("llama", "mistral3"), "[IMG]", _PIXTRAL),
    "lfm2": ProjectorKind(("lfm2", "lfm2moe"), "<image>", _LFM2),
    "internvl": ProjectorKind(
        ("qwen2", "qwen3", "qwen3moe", "llama", "internlm2", "gpt-oss"), "<IMG_CONTEXT>", _INTERNVL
    ),
}


def projector_of(path: Path, named: str | None) -> Path | None:
    """Return the file with the vision encoder of the model in `path`: the named one, otherwise projector_beside().

    Errors: those of projector_beside(); ConfigError for a named one if the model takes none; ModelFileError if it is
    not a projector, or is another model's.
    """
    if named is None:
        return projector_beside(path)
    if path.suffix != ".gguf":
        raise ConfigError(f"mmproj is for models in .gguf files, and {path} is not one: leave it out")
    file = Path(os.path.abspath(os.path.expanduser(named)))
    if file.suffix != ".gguf" or not file.is_file():
        raise ModelFileError(f"mmproj: there is no .gguf file {file}")
    if fault := _fault(file, path):
        raise ModelFileError(f"mmproj: {file} {fault}")
    return file


def projector_beside(path: Path) -> Path | None:
    """Return the first file by name that has the vision encoder of the model in `path`; None if there is none.

    Errors: those of read_gguf(), for the model's file and for any file named like its projector.
    """
    if path.suffix != ".gguf":
        return None
    files = [file for file in sorted(path.parent.glob("*.gguf")) if "mmproj" in file.name.lower() and file != path]
    return next((file for file in files if not _fault(file, path)), None)


def projector_kind(metadata: dict[str, GgufValue]) -> str:
    """Return llama.cpp's name of a projector; "" if the file has none."""
    return str(metadata.get("clip.vision.projector_type") or metadata.get("clip.projector_type") or "")


def processor_settings(file: Path) -> bytes:
    """Return the content that the model's preprocessor_config.json would have. Errors: ModelFileError; those of
    read_gguf().
    """
    metadata = read_gguf(file).metadata
    makes = {_QWEN: _any_size, _GEMMA4: _pooled, _LFM2: _siglip2, _INTERNVL: _squares}
    if (make := makes.get(PROJECTOR_KINDS[projector_kind(metadata)].processor)) is not None:
        return json.dumps(make(metadata)).encode()
    side = metadata.get("clip.vision.image_size")
    longest = metadata.get("clip.vision.preproc_image_size")
    if isinstance(side, int) and PROJECTOR_KINDS[projector_kind(metadata)].processor == _PIXTRAL:
        return json.dumps({"image_processor_type": _PIXTRAL, "size": {"longest_edge": side}}).encode()
    if not isinstance(side, int) or not isinstance(longest, int | None):
        raise ModelFileError(f"{file}: clip.vision.image_size and preproc_image_size must be numbers of pixels")
    settings: dict[str, Any] = {"image_processor_type": PROJECTOR_KINDS[projector_kind(metadata)].processor}
    if settings["image_processor_type"] == "Gemma3ImageProcessor":
        settings["size"] = {"height": side, "width": side}
    else:
        settings |= {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": longest or side}}
        settings["do_image_splitting"] = longest is not None
    return json.dumps(settings).encode()


def pixel_bounds(metadata: dict[str, GgufValue]) -> tuple[int, int]:
    """Return the fewest and the most pixels of an image of any size. Errors: ModelFileError."""
    names, default = ("image_min_pixels", "image_max_pixels"), _BOUNDS.get(projector_kind(metadata), _OTHER_BOUNDS)
    low, high = (metadata.get(f"clip.vision.{name}", one) for name, one in zip(names, default, strict=True))
    if not isinstance(low, int) or not isinstance(high, int) or not 1 <= low <= high:
        raise ModelFileError(
            f"clip.vision.image_min_pixels and image_max_pixels must be numbers of pixels, got {low!r:.80} and "
            f"{high!r:.80}"
        )
    return low, high


def pooling_size(metadata: dict[str, GgufValue]) -> int:
    """Return the patches on a side of what becomes a row of Gemma 4. Errors: ModelFileError."""
    size = metadata.get("clip.vision.projector.scale_factor", 3)
    if not isinstance(size, int) or not 1 <= size <= 64:
        raise ModelFileError(f"clip.vision.projector.scale_factor must be a number of patches, got {size!r:.80}")
    return size


def _pooled(metadata: dict[str, GgufValue]) -> dict[str, Any]:
    return {
        "image_processor_type": _GEMMA4,
        "patch_size": metadata.get("clip.vision.patch_size"),
        "pooling_kernel_size": pooling_size(metadata),
        "max_soft_tokens": POOLED_ROWS,
    }


def _siglip2(metadata: dict[str, GgufValue]) -> dict[str, Any]:
    """Return LFM2-VL's settings. Files have none of its limits, which are the processor's own."""
    return {
        "image_processor_type": _LFM2,
        "encoder_patch_size": metadata.get("clip.vision.patch_size"),
        "downsample_factor": metadata.get("clip.vision.projector.scale_factor", 2),
    }


def _squares(metadata: dict[str, GgufValue]) -> dict[str, Any]:
    side = metadata.get("clip.vision.image_size")
    return {
        "image_processor_type": _INTERNVL,
        "size": {"height": side, "width": side},
        "min_patches": metadata.get("clip.vision.preproc_min_tiles", 1),
        "max_patches": metadata.get("clip.vision.preproc_max_tiles", 12),
    }


def _any_size(metadata: dict[str, GgufValue]) -> dict[str, Any]:
    low, high = pixel_bounds(metadata)
    return {
        "image_processor_type": _QWEN,
        "patch_size": metadata.get("clip.vision.patch_size"),
        "merge_size": metadata.get("clip.vision.spatial_merge_size", 2),
        "size": {"shortest_edge": low, "longest_edge": high},
    }


def _fault(file: Path, path: Path) -> str:
    """Return why a file is not the projector of the model in `path`; "" if it is."""
    metadata, model = read_gguf(file).metadata, read_gguf(path).metadata
    name, text = projector_kind(metadata), model.get("general.architecture")
    if metadata.get("general.architecture") != "clip":
        return (
            f"is not a projector: its general.architecture is {metadata.get('general.architecture')!r:.80}, not 'clip'"
        )
    if (kind := PROJECTOR_KINDS.get(name)) is None:
        return f"has a projector of type {name!r:.80}; supported are {', '.join(PROJECTOR_KINDS)}"
    if text not in kind.texts:
        return f"is for models of the architecture {' or '.join(map(repr, kind.texts))}, and {path} has {text!r:.80}"
    theirs, ours = metadata.get("clip.vision.projection_dim"), model.get(f"{text}.embedding_length")
    if theirs != ours:
        return f"belongs to another model: its rows have {theirs!r:.80} numbers, but those of {path} have {ours!r:.80}"
    if kind.mark not in (gguf_tokens(model) or ()):
        return f"needs the token {kind.mark}, which is not in the vocabulary of {path}"
    return ""
