"""The messages between a server and template_process.py, which renders the templates of its callers."""

from typing import Any

import msgspec


class Chat(msgspec.Struct, frozen=True):
    """A chat to be rendered. arguments: further ones of render_chat()."""

    template: str
    messages: list[dict[str, Any]]
    arguments: dict[str, Any]


class Rendered(msgspec.Struct, frozen=True):
    """The answer to a Chat: its prompt, or the reason why it has none."""

    prompt: str = ""
    error: str = ""


encode_message = msgspec.msgpack.Encoder().encode
decode_chat = msgspec.msgpack.Decoder(Chat).decode
decode_rendered = msgspec.msgpack.Decoder(Rendered).decode
