"""Messages on a running engine's weights: the calls that change them and let them sleep, and what the engine computes
with.
"""

from enum import IntEnum

import msgspec

from ipc.wire.call import Call


class UpdateMode(IntEnum):
    """What happens to requests that have begun when the weights change."""

    WAIT = 0  # they end with the old weights first; until then no request begins
    KEEP = 1  # they continue with the new ones: their keys and values are computed again, and their outputs are marked
    ABORT = 2  # they are aborted


class WeightsMark(msgspec.Struct, frozen=True, array_like=True):
    """Weights that an engine has computed with."""

    version: int  # counts the updates of this engine; 0 = those that it started with
    fingerprint: str  # of the model with these weights, as in Welcome
    weights: str  # and its parts, as in Arithmetic
    variant: str


class UpdateWeights(Call, frozen=True, array_like=True, tag=34):
    """Owner only. Read other weights for the model while steps go on, then use them. Answered by Weights.

    All tensors of the model must be there, with its shapes and without NaN and infinity; otherwise nothing changes.
    """

    #: In the engine's file system: a safetensors file, a folder of them, or a .gguf file; "" = those of its start.
    path: str
    mode: UpdateMode = UpdateMode.WAIT


class GetWeights(Call, frozen=True, array_like=True, tag=35):
    """Ask which weights the engine computes with. Answered by Weights, between two steps."""


class Sleep(Call, frozen=True, array_like=True, tag=36):
    """Owner only. Free memory until WakeUp: that of the KV cache (level 1), and of the weights too (level 2).

    Requests that live wait, and continue afterwards as after a preemption. Answered by CallDone.
    """

    level: int = 1


class WakeUp(Call, frozen=True, array_like=True, tag=37):
    """Owner only. Run requests again. Answered by CallDone; after level 2 the weights must have been given again."""


class Weights(msgspec.Struct, frozen=True, array_like=True, tag=87):
    """The weights that the engine computes with from this step on."""

    call: int  # 0: of no call, but sent to all clients when the weights change
    mark: WeightsMark
    is_waiting: bool = False  # an update waits for requests to end, and until then no request begins
    are_gone: bool = False  # the engine sleeps without them
