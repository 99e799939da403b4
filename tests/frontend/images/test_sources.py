"""Images as callers give them: what is too large is refused before it takes memory."""

import io
import threading
from typing import Any

import numpy as np
import pytest

from ipc.errors import InvalidRequestError

Image = pytest.importorskip("PIL.Image")

from frontend.images import sources  # noqa: E402
from frontend.images.sources import LARGE_PIXELS, MAX_SIDE, turn_of  # noqa: E402
from tests.frontend.images.opened import open_image  # noqa: E402


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_a_side_is_bounded() -> None:
    assert open_image(png(MAX_SIDE, 1), "the prompt").size == (MAX_SIDE, 1)
    for size in ((MAX_SIDE + 1, 1), (1, MAX_SIDE + 1)):
        with pytest.raises(InvalidRequestError, match=f"at most .* are accepted, and {MAX_SIDE} on a side"):
            open_image(png(*size), "the prompt")


def test_the_area_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_PIXELS", 100)
    assert open_image(png(10, 10), "the prompt").mode == "RGB"
    with pytest.raises(InvalidRequestError, match="11 x 10 pixels; at most 100 are accepted"):
        open_image(png(11, 10), "the prompt")


def test_webp_takes_twice_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_PIXELS", 100)
    file = io.BytesIO()
    Image.new("RGB", (10, 6)).save(file, "WEBP")
    with pytest.raises(InvalidRequestError, match="10 x 6 pixels; at most 50 are accepted"):
        open_image(file.getvalue(), "the prompt")


def test_a_picture_of_the_callers_is_not_turned_in_place() -> None:
    image = Image.new("RGB", (4, 2))
    image.getexif()[0x0112] = 6  # turned by 90 degrees
    assert open_image(image, "the prompt").size == (2, 4)
    assert image.size == (4, 2)


def transparent_images() -> dict[str, Any]:
    """By mode: pictures with full, half and no alpha, as files have them."""
    noise = np.random.default_rng(1).integers(0, 256, (40, 30, 4), np.uint8)
    noise[:10, :, 3], noise[10:20, :, 3] = 0, 255
    rgba = Image.fromarray(noise)
    palette = rgba.convert("RGB").quantize(16)
    palette.info["transparency"] = 3
    alphas = rgba.convert("RGB").quantize(16)
    alphas.info["transparency"] = bytes(range(0, 256, 16))
    keyed = rgba.convert("RGB")
    keyed.info["transparency"] = keyed.getpixel((1, 1))
    grey = rgba.convert("L")
    grey.info["transparency"] = grey.getpixel((2, 2))
    return {"RGBA": rgba, "LA": rgba.convert("LA"), "P": palette, "PA": alphas, "RGB": keyed, "L": grey}


@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA", "RGB", "L"])
def test_what_is_transparent_is_on_white_as_in_transformers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.image_transforms import convert_to_rgb

    monkeypatch.setattr(sources, "_STRIP_PIXELS", 7 * 30)  # strips of 7 rows
    image = transparent_images()[mode]
    theirs = convert_to_rgb(image, return_numpy=True)
    assert not np.array_equal(theirs, np.asarray(image.convert("RGB")))
    assert np.array_equal(np.asarray(open_image(image, "the prompt")), theirs)
    file = io.BytesIO()
    image.save(file, "PNG")
    read = convert_to_rgb(Image.open(io.BytesIO(file.getvalue())), return_numpy=True)
    assert np.array_equal(np.asarray(open_image(file.getvalue(), "the prompt")), read)


def test_large_images_are_read_one_at_a_time() -> None:
    large, small = Image.new("1", (LARGE_PIXELS // 1024 + 1, 1024)), Image.new("1", (8, 8))
    entered = threading.Event()

    def read() -> None:
        with turn_of(large):
            entered.set()

    with turn_of(large):
        thread = threading.Thread(target=read)
        thread.start()
        with turn_of(small):
            assert not entered.wait(0.05)
    thread.join(10)
    assert entered.is_set()
