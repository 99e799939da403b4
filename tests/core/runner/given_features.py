"""Requests with features, for the invariance tests."""

from collections.abc import Sequence

import msgspec

from core.features.store import Features
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.messages import AddRequest


def with_features(
    sent: tuple[int, AddRequest], features: Features | None, uses: Sequence[FeatureUse]
) -> tuple[int, AddRequest]:
    """The request with these features, as the border passes it on."""
    client, message = sent
    if features is None or not uses:
        return sent
    own = [FeatureUse(use.position, use.num_rows, use.digest) for use in uses]  # whose lives are the request's
    message = features.admit(0, msgspec.structs.replace(message, features=own))
    while features.needs(message) and features.prepare(message):
        pass
    return client, message
