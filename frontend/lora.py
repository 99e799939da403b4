"""LoRARequest: the adapter that a caller requests, and its digest, which identifies it in the engine."""

import os
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from frontend.call_arguments import wrong_number
from frontend.client.client import EngineClient
from ipc.errors import CallFailedError, InvalidRequestError
from ipc.wire.lora_messages import AdapterId, LoraAdapter


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter (LoRA) of the model, under vLLM's names.

    lora_name: its name in the engine. lora_int_id: a number of at least 1; it has no effect, since the content
    identifies an adapter. lora_path: a folder saved by PEFT, in the engine's file system; "" = the engine already has
    the adapter under this name. Errors: InvalidRequestError.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidRequestError(f"lora_name must be a text that is not empty; got {self.lora_name!r:.80}")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequestError(f"lora_int_id must be a whole number of at least 1; got {self.lora_int_id!r:.80}")
        if not isinstance(self.lora_path, str | os.PathLike):
            raise InvalidRequestError(f"lora_path must be a path; got {self.lora_path!r:.80}")

    @property
    def name(self) -> str:
        """Return the adapter's name, as in vLLM's requests."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """Return the adapter's number, as in vLLM's requests."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Return the adapter's files, as in vLLM's requests."""
        return os.fspath(self.lora_path)


#: One for all prompts, or one (or None) for each. The HTTP server already has the digest.
LoRAInput: TypeAlias = LoRARequest | AdapterId | Sequence[LoRARequest | None] | None


class LoadedAdapters:
    """The adapters that one session has requested from its engine. For one thread at a time."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._loaded: dict[tuple[str, int, str], LoraAdapter] = {}

    def of_prompts(self, asked: LoRAInput, count: int) -> list[AdapterId | None]:
        """Return the adapter of each of `count` prompts, loaded if necessary.

        Errors: InvalidRequestError for a value that is not a LoRARequest, for files that are not an adapter of this
        model, and if the engine has no adapters or not this one.
        """
        if asked is None or isinstance(asked, AdapterId):
            return [asked] * count
        given = [asked] * count if isinstance(asked, LoRARequest) else list(asked)
        if len(given) != count:
            raise wrong_number("lora_request", count, len(given))
        return [None if one is None else AdapterId(self._digest(one)) for one in given]

    def _digest(self, asked: LoRARequest) -> str:
        if not isinstance(asked, LoRARequest):
            raise InvalidRequestError(f"lora_request must be a LoRARequest; got {type(asked).__name__}")
        key = asked.name, asked.adapter_id, asked.path
        if key not in self._loaded:
            self._loaded[key] = self._load(asked)
        return self._loaded[key].digest

    def _load(self, asked: LoRARequest) -> LoraAdapter:
        try:
            if asked.path:
                return self._client.load_lora(asked.name, os.path.abspath(asked.path))
            listed = self._client.list_lora()
        except CallFailedError as error:
            raise InvalidRequestError(f"the adapter {asked.name!r:.80}: {error}") from error
        for one in listed:
            if one.name == asked.name:
                return one
        names = ", ".join(one.name for one in listed) or "none"
        raise InvalidRequestError(
            f"the engine has no adapter {asked.name!r:.80} (it has {names}): give its lora_path, or load it with "
            "`engine-core control lora load`"
        )
