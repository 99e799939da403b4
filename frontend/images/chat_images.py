"""take_images: take the images out of a chat's messages, in all forms that clients send."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from frontend.images.sources import image_bytes
from ipc.errors import InvalidRequestError

#: The part of a message that represents an image in chat templates.
IMAGE_PART = {"type": "image"}
_KINDS = ("image_url", "input_image", "image", "image_pil")
_FETCHED = ("http://", "https://")
_FORMS = (
    '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}; from Python also a path, or '
    '{"type": "image", "image": ...}'
)


def take_images(messages: Any, *, takes_files: bool) -> tuple[Any, list[Any]]:
    """Return (messages, images): the messages with IMAGE_PART for each image, and the images in order.

    takes_files: whether a part may name a file of this machine; a client of a server must not. Messages of another form
    are returned as they are. Errors: InvalidRequestError.
    """
    images: list[Any] = []
    if not isinstance(messages, (list, tuple)):
        return messages, images
    read = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, (list, tuple)) and any(_is_image(part) for part in content):
            parts: list[Any] = []
            for part in content:
                if _is_image(part):
                    images.append(_image_of(part, f"messages[{index}]", takes_files=takes_files))
                    part = dict(IMAGE_PART)
                parts.append(part)
            message = {**message, "content": parts}
        read.append(message)
    return read, images


def urls_to_fetch(messages: Any) -> list[str]:
    """Return the http:// and https:// URLs of a chat's images."""
    return [url for part in _image_parts(messages) if (url := _fetched_url(part)) is not None]


def with_files(messages: Sequence[Any], files: Mapping[str, bytes]) -> list[Any]:
    """Return a chat's messages with the files of these URLs in their places."""
    read = []
    for message in messages:
        if any(_fetched_url(part) in files for part in _image_parts([message])):
            parts = [
                {"type": "image", "image": files[url]} if _is_image(part) and (url := _fetched_url(part)) else part
                for part in message["content"]
            ]
            message = {**message, "content": parts}
        read.append(message)
    return read


def has_images(messages: Any) -> bool:
    """Return whether a message has an image part: images take long to read, however short they are."""
    return next(_image_parts(messages), None) is not None


def _image_parts(messages: Any) -> Iterator[dict[str, Any]]:
    for message in messages if isinstance(messages, (list, tuple)) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, (list, tuple)):
            yield from filter(_is_image, content)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _KINDS


def _given(part: dict[str, Any]) -> Any:
    """Return what a part has as its image; None if that is not clear."""
    given: Sequence[Any] = [part[key] for key in ("image_url", "image", "image_pil", "url", "path") if key in part]
    source = given[0] if len(given) == 1 else None
    return source.get("url") if isinstance(source, dict) else source


def _fetched_url(part: dict[str, Any]) -> str | None:
    """Return the URL of a part whose image has to be fetched."""
    source = _given(part)
    return source if isinstance(source, str) and source[:8].lower().startswith(_FETCHED) else None


def _image_of(part: dict[str, Any], where: str, *, takes_files: bool) -> Any:
    """Return the source for find_image()."""
    source = _given(part)
    if source is None:
        raise InvalidRequestError(f"{where}: an image must be {_FORMS}; got {part!s:.80}")
    if not takes_files:
        if isinstance(source, bytes):  # with_files(); a body in JSON has no bytes
            return source
        if not isinstance(source, str):
            raise InvalidRequestError(f"{where}: an image must be {_FORMS}; got {part!s:.80}")
        return image_bytes(source, where)
    if isinstance(source, str) and source.startswith("file://"):
        return unquote(urlsplit(source).path)
    if isinstance(source, (str, os.PathLike)) and not str(source).startswith("data:") and "://" not in str(source):
        return source
    return image_bytes(source, where) if isinstance(source, str) else source
