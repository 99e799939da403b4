"""Images as callers give them: what is too large is refused before it takes memory."""

import io

import pytest

from ipc.errors import InvalidRequestError

Image = pytest.importorskip("PIL.Image")

from frontend.images import sources  # noqa: E402
from frontend.images.sources import MAX_SIDE, open_image  # noqa: E402


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_a_side_is_bounded() -> None:
    assert open_image(png(MAX_SIDE, 1), "the prompt").size == (MAX_SIDE, 1)
    for size in ((MAX_SIDE + 1, 1), (1, MAX_SIDE + 1)):
        with pytest.raises(InvalidRequestError, match=f"at most .* are taken, and {MAX_SIDE} on a side"):
            open_image(png(*size), "the prompt")


def test_the_area_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_PIXELS", 100)
    assert open_image(png(10, 10), "the prompt").mode == "RGB"
    with pytest.raises(InvalidRequestError, match="11 x 10 pixels; at most 100 are taken"):
        open_image(png(11, 10), "the prompt")


def test_a_picture_of_the_callers_is_not_turned_in_place() -> None:
    image = Image.new("RGB", (4, 2))
    image.getexif()[0x0112] = 6  # turned by 90 degrees
    assert open_image(image, "the prompt").size == (2, 4)
    assert image.size == (4, 2)
