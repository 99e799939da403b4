"""VectorVerifier: vectors that are known are computed again. The caller compares them, bit for bit."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from core.inputs import EngineInput, EngineReply
from ipc.options.config import EngineConfig
from ipc.tables.arrays import Floats
from ipc.wire.feature_messages import PutFeature
from ipc.wire.messages import Outputs, RequestFailed
from ipc.wire.pooling_messages import AddPooling
from tools.commands.replay.output_rows import output_rows, output_vectors
from tools.commands.verify.local_engine import CLIENT, LocalEngine, Outcome


class PooledClaim(NamedTuple):
    """A request for vectors. features: those that replace tokens of its prompt, in order."""

    message: AddPooling
    features: Sequence[PutFeature] = ()


class VectorVerifier(LocalEngine):
    """An engine in this process that computes vectors, until close().

    Errors: those of an engine's start.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._num_claims = 0

    def compute(self, claims: Sequence[PooledClaim]) -> list[Floats | Outcome]:
        """Return the vectors [n, width] of each request, or why there are none."""
        first = self._num_claims
        self._num_claims += len(claims)
        found: dict[int, Floats | Outcome] = {}
        inbox: list[tuple[int, EngineInput]] = []
        for number, (message, features) in enumerate(claims, first):
            plain = AddPooling(number, message.prompt_token_ids, message.params, second_from=message.second_from)
            asked = msgspec.structs.replace(plain, adapter=message.adapter, features=message.features)
            admitted = self.admit(asked, features)
            if isinstance(admitted, Outcome):
                found[number] = admitted
            else:
                inbox.append((CLIENT, admitted))
        while len(found) < len(claims):
            for reply in self.step(inbox):
                _take(reply, found)
            inbox = []
            assert len(found) == len(claims) or self.has_work, "the engine has lost a request"
        return [found[number] for number in range(first, first + len(claims))]


def _take(reply: EngineReply, found: dict[int, Floats | Outcome]) -> None:
    """Note the vectors that a reply has, and the requests that end without any."""
    if isinstance(reply, RequestFailed):
        found[reply.number] = Outcome(failure=reply.message)
    if not isinstance(reply, Outputs):
        return
    found.update(output_vectors(reply))
    for row in output_rows(reply):
        if row.finish:
            found.setdefault(row.number, Outcome(failure="the engine ended it without vectors"))
