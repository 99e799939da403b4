"""Features of an engine with workers: the engine encodes images, and sends the workers all rows that plans need.

A worker keeps what it has received until it is told to drop it.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from core.execution.plan import SchedulerOutput
from core.executors.features import features_for
from core.features.store import Features
from core.model_files.assistant import has_assistant
from core.model_files.loading import load_vision
from core.model_files.model_config import read_model_config
from core.model_files.pooling import pools
from core.runner.feature_rows import EncoderShape, FeatureRows
from core.workers.messages import AddFeature, DropFeatures
from ipc.errors import ConfigError
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.options.workers import drafts_by_model
from ipc.tables.arrays import Floats
from kernels.elements import ELEMENT_TYPES

#: Most bytes of rows in one message: a channel takes no message of a gigabyte, as the largest images would need.
MESSAGE_BYTES = 1 << 26


class FeatureSender:
    """Follows plans, and says what workers must have before each. features: the engine's."""

    def __init__(self, features: Features) -> None:
        self._features, self._rows = features, FeatureRows(features)
        self._encoded: set[bytes] = set()  # digests of images, as plans say

    def forget(self) -> None:
        """Forget all rows: the workers were lost."""
        self._rows = FeatureRows(self._features)

    def messages(self, plan: SchedulerOutput, held: set[bytes]) -> Iterator[AddFeature | DropFeatures]:
        """Encode the images of a plan, and yield what makes workers have what it needs.

        held: digests of what they have; it is updated.
        """
        self._rows.apply(plan)
        self._encoded.difference_update(plan.freed_encoder_inputs)
        rows, encoded = self._rows.of_row, plan.scheduled_encoder_inputs
        self._encoded.update(rows[row][place].digest for row, places in encoded for place in places)
        self._encoded.update(digest for digest, _ in plan.image_parts if self._features.is_encoded(digest))
        needed = self._encoded | {use.digest for uses in rows.values() for use in uses if not use.is_encoded}
        if gone := held - needed:
            held -= gone
            yield DropFeatures(sorted(gone))
        for digest in sorted(needed - held):
            held.add(digest)
            found = np.ascontiguousarray(self._features.find(digest), np.float32)
            count = max(1, MESSAGE_BYTES // found[:1].nbytes)
            for first in range(0, len(found), count):
                yield AddFeature(digest, found.shape[1], found[first : first + count].tobytes())


class ReceivedFeatures:
    """The rows that a worker has received; KeptFeatures of its runner.

    encoder: of images, which runs in the engine; known when the executor has loaded the model.
    """

    encoder: EncoderShape | None = None

    def __init__(self) -> None:
        self._rows: dict[bytes, Floats] = {}

    def add(self, message: AddFeature) -> None:
        """Keep rows of a feature, behind those that have come before."""
        rows = np.frombuffer(message.rows, np.float32).reshape(-1, message.width)
        earlier = self._rows.get(message.digest)
        self._rows[message.digest] = rows if earlier is None else np.concatenate((earlier, rows))

    def forget(self, digests: Iterable[bytes]) -> None:
        """Forget features."""
        for digest in digests:
            del self._rows[digest]

    def encode(self, digest: bytes) -> None:
        """Do nothing: the engine has encoded the image, and its rows have arrived."""
        assert digest in self._rows, f"the rows of {digest.hex()[:16]} have not been sent"

    def encode_part(self, digest: bytes, part: int) -> None:
        """Do nothing: the engine encodes the image, and its rows arrive after the last part."""

    def drop(self, digests: Iterable[bytes]) -> None:
        """Do nothing: the engine says what to forget."""

    def find(self, digest: bytes) -> Floats:
        """Return the rows of a feature."""
        return self._rows[digest]


class UnreadFeatures(ReceivedFeatures):
    """The features of a worker of a later stage, which gets hidden states of all tokens. It knows where they are."""

    _rows_of_any = np.empty((1 << 40, 0), np.float32)  # no bytes

    def encode(self, digest: bytes) -> None:
        """Do nothing: the first stage has the rows."""

    def find(self, digest: bytes) -> Floats:
        """Return rows without numbers, more than any feature has."""
        return self._rows_of_any


def sent_features(config: EngineConfig, dtype: str) -> Features | None:
    """Return the features of an engine whose workers read them. dtype: the model's.

    Errors: those of the model's files, for its encoder of images; ConfigError for a scheduler that may not plan images.
    """
    path = resolve_model(config.model)
    encoder = load_vision(path, ELEMENT_TYPES[dtype], config)
    has_images = encoder is not None and config.limit_mm_per_prompt.get("image") != 0
    if has_images and config.scheduler_cls != BUILT_IN_SCHEDULER:
        raise ConfigError(
            f"scheduler_cls={config.scheduler_cls!r} may plan no images, whose rows workers are sent as plans say: "
            "leave it out, or set limit_mm_per_prompt to image=0"
        )
    drafts = drafts_by_model(config) and not has_assistant(config)
    model = read_model_config(path, config.mmproj)
    return features_for(config, model, encoder, drafts=drafts, pools=pools(config, path, model))
