"""open_image: an image in any form in which a caller may give it, as Pillow's image in RGB."""

import base64
import binascii
import io
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from ipc.errors import InvalidRequestError, UnsupportedParameterError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Largest image, in pixels and as a file in bytes; and its longer side, since resizing takes memory by it.
MAX_PIXELS, MAX_FILE_BYTES, MAX_SIDE = 64 << 20, 32 << 20, 1 << 15
MAX_PROMPT_PIXELS = 4 * MAX_PIXELS  # of all images of a prompt
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_FORMS = "a path, bytes of a file, an image of Pillow's, or an array [height, width, 3] of uint8"


def open_image(source: Any, name: str) -> "Image":
    """Return an image in RGB, turned as its EXIF data says.

    name: of the prompt, for errors. Errors: InvalidRequestError; UnsupportedParameterError without Pillow.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise UnsupportedParameterError(
            "images need Pillow, which is not installed here: pip install 'llm-engine-core[vision]'"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is the bound
            image = source if isinstance(source, Image.Image) else _opened(source, name)
            if image.width * image.height > MAX_PIXELS or max(image.size) > MAX_SIDE:
                raise InvalidRequestError(
                    f"{name}: an image of {image.width} x {image.height} pixels; at most {MAX_PIXELS} are taken, and "
                    f"{MAX_SIDE} on a side"
                )
            if image is source:
                image = ImageOps.exif_transpose(image)  # a copy
            else:
                ImageOps.exif_transpose(image, in_place=True)
            return image if image.mode == "RGB" else image.convert("RGB")
    except InvalidRequestError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequestError(f"{name}: the image cannot be read: {error}") from error


def image_bytes(url: str, name: str) -> bytes:
    """Return the file in a data: URL. Errors: InvalidRequestError, also for another kind of URL."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise InvalidRequestError(
            f"{name}: an image's URL must be data:image/...;base64,...; got {url!r:.60}. Nothing is fetched from a "
            "network: send the image itself"
        )
    if len(data) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise InvalidRequestError(f"{name}: an image's file has at most {MAX_FILE_BYTES} bytes")
    if not head.endswith(";base64"):
        raise InvalidRequestError(f"{name}: an image's data: URL must be in base64; got {head!r:.60}")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{name}: an image's data: URL is no base64: {error}") from None


def _opened(source: Any, name: str) -> "Image":
    from PIL import Image

    if isinstance(source, str) and source.startswith("data:"):
        source = image_bytes(source, name)
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise InvalidRequestError(
                f"{name}: an image's array is [height, width, 3] of uint8; got {list(source.shape)} of {source.dtype}"
            )
        return Image.fromarray(source)
    if isinstance(source, str) and "://" in source:
        raise InvalidRequestError(f"{name}: nothing is fetched from a network ({source!r:.60}): an image is {_FORMS}")
    if isinstance(source, (str, os.PathLike)):
        if os.path.getsize(source) > MAX_FILE_BYTES:
            raise InvalidRequestError(f"{name}: an image's file has at most {MAX_FILE_BYTES} bytes")
        with open(source, "rb") as file:
            source = file.read()
    if not isinstance(source, (bytes, bytearray)):
        raise InvalidRequestError(f"{name}: an image must be {_FORMS}; got {type(source).__name__}")
    return Image.open(io.BytesIO(source), formats=_FORMATS)
