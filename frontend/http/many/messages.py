"""The messages between the HTTP worker and the host of the models, as lines of JSON over a private Unix socket."""

from typing import Any, Literal

import msgspec

#: Of a created model: its Change as sent. With all of them, and those of a list, Known is shorter than a line may be.
MAX_CHANGE_BYTES = 128 << 10
MAX_CREATED = 256  # models
MAX_LINE_BYTES = 64 << 20


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP worker knows of a model that may be loaded. num_bytes: what it takes in memory; None = it must be
    pulled first, or its files cannot be read.
    """

    name: str
    num_bytes: int | None
    weight_bytes: int = 0
    kv_bytes: int = 0
    problem: str = ""  # why it cannot be loaded
    keep_alive_s: float = 300.0  # below 0: until memory is needed
    aliases: tuple[str, ...] = ()
    adapters: dict[str, str] = {}  # name -> folder
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    system: str | None = None  # of chats without a system message
    capabilities: tuple[str, ...] = ("completion", "tools")  # under Ollama's names
    format: str = ""
    architecture: str = ""
    max_model_len: int | None = None
    modified: float = 0.0  # Unix seconds


class Known(msgspec.Struct, tag=True, frozen=True):
    """All models, the memory for them, and the addresses of the engines that run; "" = that engine loads."""

    cards: tuple[Card, ...]
    memory: int
    running: dict[str, str]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A model's engine answers at this address."""

    name: str
    address: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A model's engine has ended, or did not start. text: why; "" = it was asked to."""

    name: str
    text: str = ""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """The state of a change. error: it failed. is_final: there is no other line."""

    id: int
    line: dict[str, Any]
    is_final: bool = False
    error: str = ""


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Load a model."""

    name: str


class End(msgspec.Struct, tag=True, frozen=True):
    """End a model's engine."""

    name: str


class Change(msgspec.Struct, tag=True, frozen=True):
    """Change the models. source: of a copy, or the model that a created one is made from."""

    id: int
    kind: Literal["pull", "copy", "create", "delete"]
    name: str
    source: str = ""
    options: dict[str, Any] = {}


News = Known | Ready | Ended
ToWorker = News | Progress
ToHost = Begin | End | Change
