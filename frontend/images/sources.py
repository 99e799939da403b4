"""find_image, read_pixels: an image from any form that a caller may give, as Pillow's image in RGB."""

import base64
import binascii
import io
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.wire.feature_messages import MAX_IMAGE_PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image

#: Largest image, in pixels and as a file in bytes; and its longer side, on which resizing's memory depends. A pixel
#: takes 8 bytes while an image is converted: 4 as it was decoded and 4 in RGB.
MAX_PIXELS, MAX_FILE_BYTES, MAX_SIDE = MAX_IMAGE_PIXELS, 32 << 20, 1 << 15
_MEMORY = {"WEBP": 2}  # format -> memory of a pixel while it is decoded, relative to other formats
MAX_PROMPT_PIXELS = 8 * MAX_PIXELS  # of all images of a prompt
LARGE_PIXELS = 4 << 20  # images with more are read one at a time: turn_of()
_LARGE_TURN = threading.Lock()
_STRIP_PIXELS = 1 << 20  # height of the strips in which transparent images are put on white
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_FORMS = "a path, bytes of a file, an image of Pillow's, or an array [height, width, 3] of uint8"


def find_image(source: Any, name: str) -> "Image":
    """Return an image whose size has been checked, and whose pixels are not read yet.

    name: of the prompt, for errors. Errors: InvalidRequestError; UnsupportedParameterError without Pillow.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UnsupportedParameterError(
            "images need Pillow, which is not installed here: pip install pillow, or engine-core with its extra "
            "[vision]"
        ) from None
    with _errors(name), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is the bound
        image = source if isinstance(source, Image.Image) else _opened(source, name)
    most = MAX_PIXELS // _MEMORY.get(str(image.format), 1)
    if image.width * image.height > most or max(image.size) > MAX_SIDE:
        raise InvalidRequestError(
            f"{name}: an image of {image.width} x {image.height} pixels; at most {most} are accepted, and {MAX_SIDE} "
            "on a side"
        )
    return image


def read_pixels(image: "Image", source: Any, name: str) -> "Image":
    """Return find_image()'s image in RGB, rotated by its EXIF data, with transparent parts on white.

    If `source` itself is a Pillow image, it is not changed. Errors: InvalidRequestError.
    """
    from PIL import ImageOps

    with _errors(name):
        if image is source:
            image = ImageOps.exif_transpose(image)  # a copy
        else:
            ImageOps.exif_transpose(image, in_place=True)
        return in_rgb(image)


def turn_of(image: "Image") -> AbstractContextManager[object]:
    """Return the context in which an image's pixels are read: large images wait for each other, so that only one of
    them takes memory.
    """
    return _LARGE_TURN if image.width * image.height > LARGE_PIXELS else nullcontext()


def in_rgb(image: "Image") -> "Image":
    """Return an image in RGB with transparent parts on white, as in transformers' processors.

    Strip by strip, so that no second four-channel image is in memory.
    """
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    result = Image.new("RGB", image.size)
    height = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, height):
        strip = image.crop((0, top, image.width, min(top + height, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        result.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return result


def image_bytes(url: str, name: str) -> bytes:
    """Return the file in a data: URL. Errors: InvalidRequestError, including for other kinds of URL."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise InvalidRequestError(
            f"{name}: an image's URL must be data:image/...;base64,...; got {url!r:.60}. Only an HTTP "
            "server with --allowed-media-domains fetches URLs: send the image itself"
        )
    if len(data) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise InvalidRequestError(f"{name}: an image's file has at most {MAX_FILE_BYTES} bytes")
    if not head.endswith(";base64"):
        raise InvalidRequestError(f"{name}: an image's data: URL must be in base64; got {head!r:.60}")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{name}: an image's data: URL is not base64: {error}") from None


@contextmanager
def _errors(name: str) -> Iterator[None]:
    from PIL import Image

    try:
        yield
    except InvalidRequestError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequestError(f"{name}: the image cannot be read: {error}") from error


def _opened(source: Any, name: str) -> "Image":
    from PIL import Image

    if isinstance(source, str) and source.startswith("data:"):
        source = image_bytes(source, name)
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise InvalidRequestError(
                f"{name}: an image's array must be [height, width, 3] of uint8; got {list(source.shape)} of "
                f"{source.dtype}"
            )
        return Image.fromarray(source)
    if isinstance(source, str) and "://" in source:
        raise InvalidRequestError(f"{name}: no URL is fetched ({source!r:.60}): an image must be {_FORMS}")
    if isinstance(source, (str, os.PathLike)):
        if os.path.getsize(source) > MAX_FILE_BYTES:
            raise InvalidRequestError(f"{name}: an image's file has at most {MAX_FILE_BYTES} bytes")
        with open(source, "rb") as file:
            source = file.read()
    if not isinstance(source, (bytes, bytearray)):
        raise InvalidRequestError(f"{name}: an image must be {_FORMS}; got {type(source).__name__}")
    return Image.open(io.BytesIO(source), formats=_FORMATS)
