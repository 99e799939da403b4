"""Messages on pooling: the request whose answer is vectors, and the vectors, as columns of Outputs."""

import msgspec

from ipc.params.pooling_params import PoolingParams
from ipc.wire.feature_messages import FeatureUses
from ipc.wire.lora_messages import AdapterId


class AddPooling(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Submit one pooling request. Answered by Pooled columns and the end of its number, or by RequestFailed.

    Number, Abort, deadline and resumption work as for AddRequest.
    """

    number: int  # uint32, chosen by the client, never reused within a session
    prompt_token_ids: bytes  # int32[num_prompt_tokens]
    params: PoolingParams
    priority: int = 0
    deadline_ms: int = 0
    cache_salt: str = ""
    tenant: str = ""
    #: Index of the first token of a pair's second text, for models that distinguish the two; 0 = there is one text.
    second_from: int = 0
    adapter: AdapterId | None = None  # as in AddRequest
    features: FeatureUses = []  # as in AddRequest

    @property
    def delivered(self) -> list[bytes]:
        """Return no tokens: a pooling request is answered at once, at its end."""
        return []


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """The vectors of P requests that end in this message, as columns."""

    numbers: bytes  # uint32[P]
    counts: bytes  # uint32[P]: vectors of each: 1, or one for each token of the prompt
    widths: bytes  # uint32[P]: numbers of each vector
    values: bytes  # float32[sum(counts * widths)]: vector after vector, request after request
