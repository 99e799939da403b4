"""KnownTokenizers: the tokenizers of earlier sessions, for engines that start again with the same files.

AHEAD has those that were made while an engine started, for the session with it.
"""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Mapping

from frontend.text.tokenizer import Tokenizer
from ipc.errors import EngineCoreError
from ipc.files.model_files import tokenizer_hash
from ipc.options.config import EngineConfig
from ipc.options.tokenizer_files import client_files_of


class KnownTokenizers:
    """The last `most` tokenizers and their files, by the hash of the files. It may be used by several threads.

    To make the tokenizer of 150,000 tokens takes more than half a second of CPU time.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._known: OrderedDict[str, tuple[Tokenizer, Mapping[str, bytes]]] = OrderedDict()

    def get(self, files_hash: str) -> tuple[Tokenizer, Mapping[str, bytes]] | None:
        """Return a tokenizer, with bounds of its own, and its files; None: it is not known."""
        found = self._known.pop(files_hash, None)
        if found is None:
            return None
        self._known[files_hash] = found
        return copy.copy(found[0]), found[1]

    def take(self, files_hash: str) -> tuple[Tokenizer, Mapping[str, bytes]] | None:
        """Return a tokenizer and its files, and forget all; None: it is not known."""
        found = self._known.get(files_hash)
        self._known.clear()
        return found

    def put(self, files_hash: str, tokenizer: Tokenizer, files: Mapping[str, bytes]) -> None:
        """Keep a tokenizer. The least recently used ones are forgotten. files_hash: "" = it has no files."""
        if files_hash:
            self._known[files_hash] = (tokenizer, files)
            while len(self._known) > self._most:
                self._known.pop(next(iter(self._known)), None)


#: The tokenizers that make_ahead() has made. Each is taken once, by the session for which it was made.
AHEAD = KnownTokenizers(1)


def make_ahead(config: EngineConfig) -> None:
    """Make the tokenizer of an engine that is starting. What is wrong with the files is said by the session.

    config: with the path of its model, not a Hugging Face name.
    """
    with contextlib.suppress(EngineCoreError):
        if files := client_files_of(config):
            AHEAD.put(tokenizer_hash(files), Tokenizer.from_files(files), files)
