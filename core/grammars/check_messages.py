"""The messages between an engine and the process that checks grammars for it (core/grammars/check.py)."""

from typing import TypeAlias

import msgspec

from ipc.structured_outputs import StructuredOutputsParams


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """The first message to the process: what core/grammars/vocabulary.py makes a vocabulary from."""

    files: dict[str, bytes]
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Check(msgspec.Struct, frozen=True, tag=True):
    """A grammar to be compiled."""

    params: StructuredOutputsParams


class Verdict(msgspec.Struct, frozen=True):
    """The answer to a Check."""

    error: str = ""  # why the grammar cannot be used


Question: TypeAlias = Vocabulary | Check

encode_message = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode
