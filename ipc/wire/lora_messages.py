"""Messages on adapters (LoRA): the adapter of a request, and the calls that load, unload and list adapters."""

import msgspec

from ipc.wire.call import Call


class AdapterId(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """The adapter of a request, by its content: equal digests (and an equal model) mean equal tokens.

    The engine keeps an adapter as long as such an object of a request exists.
    """

    digest: str  # 32 hexadecimal digits, as in LoraAdapter


class LoraAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests may name."""

    name: str
    digest: str
    rank: int  # the largest of its matrices
    num_bytes: int  # that it takes in memory
    path: str = ""  # its files; sent to the owner only


class LoadLora(Call, frozen=True, array_like=True, tag=27):
    """Owner only. Read an adapter's files while steps go on. Answered by LoraAdapters with this one.

    If the name is in use, it means the new content from then on; running requests continue with the old one.
    """

    name: str
    path: str  # in the engine's file system: a PEFT folder, or a .gguf file


class UnloadLora(Call, frozen=True, array_like=True, tag=28):
    """Owner only. Remove an adapter's name; running requests continue. Answered by CallDone."""

    name: str


class ListLora(Call, frozen=True, array_like=True, tag=29):
    """Ask for the adapters. Answered by LoraAdapters."""


class LoraAdapters(msgspec.Struct, frozen=True, array_like=True, tag=86):
    """The adapters that are loaded, by name."""

    call: int
    adapters: list[LoraAdapter] = []
    is_enabled: bool = True  # False: the engine was started without enable_lora
