"""PlacedFeature: a feature in a prompt, with its content, kept by a client until its request has ended."""

from typing import NamedTuple

from ipc.tables.arrays import Floats
from ipc.wire.feature_messages import EMBEDS, FeatureUse, PutFeature, feature_digest

#: Most bytes of one feature with several rows; longer prompt_embeds become several features.
_PART_BYTES = 1 << 20


class PlacedFeature(NamedTuple):
    """A feature and its position. feature: sent before the request."""

    use: FeatureUse
    feature: PutFeature


def placed_embeds(rows: Floats, position: int = 0) -> list[PlacedFeature]:
    """Return a feature with rows [n, width] float32 that replace the tokens from `position`."""
    size, placed = max(1, _PART_BYTES // (4 * rows.shape[1])), list[PlacedFeature]()
    for at in range(0, len(rows), size):
        part = rows[at : at + size].astype("<f4")
        data, shape = part.tobytes(), list(part.shape)
        use = FeatureUse(position + at, len(part), feature_digest(EMBEDS, shape, data))
        placed.append(PlacedFeature(use, PutFeature(EMBEDS, shape, data)))
    return placed
