"""open_image: an image as a prompt's is read, for tests."""

from typing import Any

from frontend.images.sources import find_image, read_pixels


def open_image(source: Any, name: str) -> Any:
    return read_pixels(find_image(source, name), source, name)
