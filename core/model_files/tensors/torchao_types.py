"""The types of torchao's tensors, which a folder's safetensors files name in their metadata."""

import json
from pathlib import Path

from ipc.errors import UnsupportedModelError
from ipc.files.safetensors import read_safetensors_metadata, weight_files

#: Types that packed_codes.py reads; a Tensor is not packed.
READABLE = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Float8Tensor", "Tensor")
_MOST_CHARACTERS = 1 << 16  # of what is said of one tensor


def refuse_other_types(folder: Path) -> None:
    """Refuse a folder with tensors of types that are not read. Errors: UnsupportedModelError, ModelFileError.

    torchao writes for each tensor a JSON object with its _type, under the tensor's name.
    """
    for path in weight_files(folder):
        for name, text in read_safetensors_metadata(path).items():
            kind = _type_in(text)
            if kind is not None and kind not in READABLE:
                raise UnsupportedModelError(
                    f"{path}: tensor {name!r:.80} is torchao's {kind!r:.80}; supported are {', '.join(READABLE[:-1])}"
                )


def _type_in(text: str) -> str | None:
    if not text.startswith("{") or len(text) > _MOST_CHARACTERS:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    kind = value.get("_type")
    return kind if isinstance(kind, str) else None
