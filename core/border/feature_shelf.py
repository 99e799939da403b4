"""FeatureShelf: the border's view of an engine's features: what clients put, and the requests that name it."""

from typing import Protocol

from ipc.errors import InvalidRequestError
from ipc.wire.feature_messages import FeatureLimits, PutFeature
from ipc.wire.messages import AddRequest, Submission

NO_FEATURES = "this engine takes no features (prompt_embeds, images): its executor runs no model that reads them"


class FeatureShelf(Protocol):
    """The features that an engine keeps; its methods do not block."""

    @property
    def limits(self) -> FeatureLimits | None:
        """What clients are told; None: requests have no features."""

    def num_bytes(self, message: AddRequest) -> int:
        """Return the bytes of the rows that a request names."""

    def put(self, client: int, feature: PutFeature) -> None:
        """Keep what a client has put."""

    def forget(self, client: int) -> None:
        """Drop what a client has put, whose session has ended."""

    def admit(self, client: int, message: AddRequest) -> AddRequest:
        """Return a request with its features' ids in the prompt. Errors: InvalidRequestError."""


class NoFeatures:
    """The shelf of an engine without features, which refuses requests that have any."""

    limits = None

    def num_bytes(self, message: AddRequest) -> int:
        """Return 0: the request is refused."""
        return 0

    def put(self, client: int, feature: PutFeature) -> None:
        """Drop it: a request that names it is refused."""

    def forget(self, client: int) -> None:
        """Do nothing."""

    def admit(self, client: int, message: AddRequest) -> AddRequest:
        """Refuse the request. Errors: InvalidRequestError."""
        raise InvalidRequestError(NO_FEATURES)


def admitted(shelf: FeatureShelf, client: int, message: Submission) -> Submission:
    """Return a valid request as the engine knows it. Errors: InvalidRequestError."""
    if not isinstance(message, AddRequest) or not message.features:
        return message
    if message.params.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs are of tokens, and features stand for none: leave one of them out")
    return shelf.admit(client, message)


def bytes_beside(shelf: FeatureShelf, message: Submission) -> int:
    """Return the bytes that a request keeps beside its own message."""
    return shelf.num_bytes(message) if isinstance(message, AddRequest) and message.features else 0
