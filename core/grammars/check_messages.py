"""The messages between an engine and the process that checks grammars for it (core/grammars/check.py)."""

from typing import TypeAlias

import msgspec

from core.grammars.vocabulary import Vocabulary
from ipc.params.structured_outputs import StructuredOutputsParams


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
