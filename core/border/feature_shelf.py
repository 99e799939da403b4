"""FeatureShelf: the border's view of an engine's features: those that clients put, and the requests that use them."""

from typing import Protocol

from ipc.errors import InvalidRequestError
from ipc.wire.feature_messages import FeatureLimits, PutFeature
from ipc.wire.messages import AddRequest, Submission

NO_FEATURES = "this engine does not support features (prompt_embeds, images): its model does not read them"


class FeatureShelf(Protocol):
    """The features that an engine keeps. Its methods do not block."""

    @property
    def limits(self) -> FeatureLimits | None:
        """Return the limits reported to clients; None: requests cannot have features."""

    def num_bytes(self, message: Submission) -> int:
        """Return the bytes of the embeddings that a request names."""

    def put(self, client: int, feature: PutFeature) -> None:
        """Keep a feature that a client has put."""

    def forget(self, client: int) -> None:
        """Drop what a client has put, because its session has ended."""

    def admit(self, client: int, message: Submission) -> Submission:
        """Return a request with its features' ids in the prompt. Errors: InvalidRequestError."""


class NoFeatures:
    """The shelf for an engine without features. It refuses requests that have any."""

    limits = None

    def num_bytes(self, message: Submission) -> int:
        """Return 0: the request is refused."""
        return 0

    def put(self, client: int, feature: PutFeature) -> None:
        """Drop it: a request that names it will be refused."""

    def forget(self, client: int) -> None:
        """Do nothing."""

    def admit(self, client: int, message: Submission) -> Submission:
        """Refuse the request. Errors: InvalidRequestError."""
        raise InvalidRequestError(NO_FEATURES)


def admitted(shelf: FeatureShelf, client: int, message: Submission) -> Submission:
    """Return a valid request in the engine's form. Errors: InvalidRequestError."""
    if not message.features:
        return message
    if isinstance(message, AddRequest) and message.params.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs need tokens, and features have none: leave out one of the two")
    return shelf.admit(client, message)


def bytes_beside(shelf: FeatureShelf, message: Submission) -> int:
    """Return the bytes that a request keeps in addition to its own message."""
    return shelf.num_bytes(message) if message.features else 0
