"""WeightMarks: the weights that an engine has changed to, as far as a client knows."""

from msgspec.structs import replace

from ipc.errors import InvalidRequestError
from ipc.wire.messages import Welcome
from ipc.wire.weights_messages import WeightsMark

_MAX_MARKS = 256


class WeightMarks:
    """The last marks by version, oldest first. The client's lock guards them."""

    def __init__(self) -> None:
        self._marks: dict[int, WeightsMark] = {}

    @property
    def version(self) -> int:
        """Return the latest version; 0 = the weights of the engine's start."""
        return next(reversed(self._marks), 0)

    def note(self, mark: WeightsMark | None) -> None:
        """Note what the engine computes with now. None and version 0: what it started with."""
        if mark is not None and mark.version:
            self._marks[mark.version] = mark
        if len(self._marks) > _MAX_MARKS:
            del self._marks[next(iter(self._marks))]

    def apply(self, welcome: Welcome, version: int) -> Welcome:
        """Return an engine's Welcome as it would be with the weights of this version.

        Errors: InvalidRequestError if they are not known: a client knows the last ones since its beginning.
        """
        if not version:
            return replace(welcome, weights=None)
        mark, arithmetic = self._marks.get(version), welcome.arithmetic
        if mark is None or arithmetic is None:
            raise InvalidRequestError(f"nothing is known of the weights of version {version}")
        own = replace(arithmetic, weights=mark.weights, variant=mark.variant)
        return replace(welcome, model_fingerprint=mark.fingerprint, arithmetic=own, weights=mark)
