"""PartialFeature: a feature that a client puts in several messages, until the last of them has come."""

from ipc.wire.feature_messages import PutFeature, begin_digest


class PartialFeature:
    """The parts that have come, in order, and their digest. refusal: why it will not be kept; then no part is."""

    def __init__(self, first: PutFeature, refusal: str | None) -> None:
        self.refusal, self.left, self.num_bytes = refusal, first.left + len(first.data), 0
        self._kind, self._shape = first.kind, list(first.shape)
        self._parts: list[bytes] = []
        self._digest = begin_digest(first.kind, first.shape)

    def continues(self, part: PutFeature) -> bool:
        """Return whether a message is the next part."""
        return (part.kind, part.shape, len(part.data) + part.left) == (self._kind, self._shape, self.left)

    def add(self, part: PutFeature) -> None:
        """Add the next part."""
        self.left = part.left
        self._digest.update(part.data)
        if self.refusal is None:
            self._parts.append(part.data)
            self.num_bytes += len(part.data)

    def finish(self) -> tuple[bytes, PutFeature | str]:
        """Return the digest of the whole, and the whole or the refusal, after the last part."""
        assert not self.left, self.left
        whole = PutFeature(self._kind, self._shape, b"".join(self._parts))
        return self._digest.digest(), whole if self.refusal is None else self.refusal
