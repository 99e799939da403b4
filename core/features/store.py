"""Features: one engine's features, by content: what clients have put, and the embeddings that replace tokens.

A feature is put before the request that names it. A preparation thread converts given embeddings, so that the scheduler
only sees requests whose rows exist. They are kept as long as a live request uses them, and after that as long as there
is room. An image is kept as pixels while a live request uses it. The scheduler decides which step encodes it and how
long its rows are kept (core/scheduling/encoder_inputs.py): a plan says so, and the executor calls encode() and drop(),
or encode_part() for a large image, whose encoding is spread over steps.

A feature has a number. The tokens that it replaces have the negative id -1 - number, so blocks of equal tokens have
equal content, and the prefix cache needs no further key. Numbers are never reused while the engine lives.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from core.features.partial import PartialFeature
from core.holders import Holders
from ipc.errors import InvalidRequestError
from ipc.tables.arrays import Floats, UInt8s
from ipc.wire.feature_messages import (
    EMBEDS,
    ITEM_BYTES,
    MAX_FEATURES,
    PIXELS,
    FeatureLimits,
    FeatureUse,
    PutFeature,
    feature_digest,
    num_bytes,
)
from ipc.wire.messages import MAX_CLIENT_MESSAGE_BYTES, Submission

#: Bytes of rows of given embeddings kept although no request uses them.
MAX_CACHED_BYTES = 256 << 20
#: Bytes of features that one session has put, and that all sessions have put. The oldest are dropped first.
MAX_SESSION_BYTES, MAX_PUT_BYTES = 128 << 20, 512 << 20
_MAX_DIMENSIONS = 3  # in a feature's shape
_MAX_SHAPE = 8  # numbers of a shape that error texts show
_MAX_NUMBERED = 2**31  # a token's id is an int32
_ONE_MESSAGE = MAX_CLIENT_MESSAGE_BYTES - 4096  # bytes of an image that clients can put which know no parts
#: Numbers that are remembered. A forgotten feature gets a new one.
MAX_NUMBERS = 65_536


class ImageRun(Protocol):
    """The encoding of an image in parts."""

    def advance(self, part: int) -> Floats | None:
        """Compute up to the end of this part, counted from 1. Return the rows [n, width] float32 after the last one."""


class ImageEncoder(Protocol):
    """The part of a model that computes embeddings from pixels."""

    image_size: int  # height and width of its images, in pixels; or what they are multiples of, if it has any_size
    num_rows: int  # per image; with any_size the most
    any_size: bool  # images have any size, and each image_size x image_size pixels become one row
    sees_whole: bool  # the tokens of an image see each other in the text model
    width: int  # numbers of a row

    def grid_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the number of rows of an image of this shape, and FeatureUse.num_columns.

        Errors: InvalidRequestError.
        """

    def pixel_bytes(self, num_rows: int) -> int:
        """Return the bytes of the pixels of an image with so many rows; 0 if there is no such image."""

    def num_parts(self, num_rows: int) -> int:
        """Return over how many steps the encoding of an image with so many rows is spread, at least 1."""

    def encode(self, pixels: UInt8s) -> Floats:
        """Return the rows [rows, width] float32 of an image [height, width, 3], as grid_of() says."""

    def begin(self, pixels: UInt8s) -> ImageRun:
        """Return encode() in num_parts() parts."""


class Features:
    """One engine's features; a Preparer (core/border/preparation.py). All methods may be called from any thread.

    width: numbers per row. encoder: None = images are not supported. refusal: why requests may not have features; "" =
    they may. max_images: of one prompt, for clients to obey; None = no limit. takes_rows: whether prompt_embeds may be
    given.
    """

    def __init__(
        self,
        width: int,
        encoder: ImageEncoder | None = None,
        refusal: str = "",
        max_cached_bytes: int = MAX_CACHED_BYTES,
        *,
        max_images: int | None = None,
        takes_rows: bool = True,
    ) -> None:
        self._width, self.encoder, self._refusal = width, encoder, refusal
        self._max_cached_bytes, self._max_images, self._takes_rows = max_cached_bytes, max_images, takes_rows
        self._lock = threading.Lock()  # for everything below
        #: What each client has put, by digest, oldest first. A text says why it is not accepted.
        self._put: dict[int, OrderedDict[bytes, PutFeature | str]] = {}
        self._begun: dict[int, PartialFeature] = {}  # by client: a feature of which parts are still to come
        self._put_bytes: dict[int, int] = {}  # by client, with what is begun
        #: By digest, of live requests: images, and embeddings until their rows are there.
        self._wanted: dict[bytes, PutFeature] = {}
        self._rows: dict[bytes, Floats] = {}  # of embeddings, by digest
        self._encoded: dict[bytes, Floats] = {}  # rows of images, by digest: the encoder cache, as plans say
        self._runs: dict[bytes, ImageRun] = {}  # of images that are encoded in parts, by digest, as plans say
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # digests of rows that no request uses, oldest first
        self._cached_bytes = 0  # total of _rows
        self._held = Holders[bytes](self._lock, self._end)  # digests of the live FeatureUses
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._num_numbered = 0
        self.num_encoded = 0  # number of images encoded

    @property
    def limits(self) -> FeatureLimits | None:
        """Return the limits reported to clients; None: requests cannot have features."""
        if self._refusal:
            return None
        if (encoder := self.encoder) is None:
            return FeatureLimits(self._width, MAX_SESSION_BYTES, max_images=self._max_images)
        rows = encoder.num_rows
        if encoder.any_size:
            rows = max(1, min(rows, _ONE_MESSAGE // encoder.pixel_bytes(1)))
        return FeatureLimits(
            self._width,
            MAX_SESSION_BYTES,
            encoder.image_size,
            rows,
            self._max_images,
            any_size=encoder.any_size,
            rows_in_parts=encoder.num_rows,
        )

    # --- at the border ---

    def num_bytes(self, message: Submission) -> int:
        """Return the most bytes that a request's features use: rows, or pixels of images.

        The rows of images are in the encoder cache, whose size does not depend on requests.
        """
        encoder, total = self.encoder, 0
        for use in message.features[:MAX_FEATURES]:
            size = max(0, use.num_rows) * self._width * 4
            if encoder is not None:  # it may be an image
                size = max(size, encoder.pixel_bytes(use.num_rows))
            total += size
        return total

    def put(self, client: int, feature: PutFeature) -> None:
        """Keep what a client has put. Above the limits, the oldest features of this or the largest client are dropped.

        One with an oversized shape is dropped at once; a request that names it is told that it is missing. So is one
        whose parts do not follow each other.
        """
        if self._refusal or len(feature.shape) > _MAX_SHAPE:
            return
        with self._lock:
            begun = self._take_begun(client, feature)
            if begun is None and not feature.left:
                digest = feature_digest(feature.kind, feature.shape, feature.data)
                self._keep(client, digest, self._judged(feature) or feature)
                return
            begun = begun or PartialFeature(feature, self._judged(feature))
            begun.add(feature)
            if not feature.left:
                self._keep(client, *begun.finish())
                return
            self._begun[client] = begun
            self._put_bytes[client] = self._put_bytes.get(client, 0) + begun.num_bytes
            self._drop_to_limits(client)

    def _take_begun(self, client: int, feature: PutFeature) -> PartialFeature | None:
        """Remove what the client has begun, and return it if this message continues it."""
        begun = self._begun.pop(client, None)
        if begun is None:
            return None
        self._put_bytes[client] -= begun.num_bytes
        return begun if begun.continues(feature) else None

    def _keep(self, client: int, digest: bytes, kept: PutFeature | str) -> None:
        put = self._put.setdefault(client, OrderedDict())
        if digest in put:
            put.move_to_end(digest)
            return
        put[digest] = kept
        self._put_bytes[client] = self._put_bytes.get(client, 0) + _bytes_of(kept)
        self._drop_to_limits(client)

    def _drop_to_limits(self, client: int) -> None:
        while self._put_bytes[client] > MAX_SESSION_BYTES or len(self._put.get(client, ())) > MAX_FEATURES:
            self._drop_oldest(client)
        while sum(self._put_bytes.values()) > MAX_PUT_BYTES:
            self._drop_oldest(max(self._put_bytes, key=lambda one: self._put_bytes[one]))

    def _judged(self, feature: PutFeature) -> str | None:
        """Return a text that says what is wrong with a feature, of which this is the first part or all."""
        size = len(feature.data) + feature.left
        try:
            self._num_rows(feature.kind, feature.shape, size)
        except InvalidRequestError as error:
            return str(error)
        return None if size <= MAX_SESSION_BYTES else f"a feature has at most {MAX_SESSION_BYTES} bytes; got {size}"

    def forget(self, client: int) -> None:
        """Drop what a client has put, because its session has ended."""
        with self._lock:
            self._put.pop(client, None)
            self._begun.pop(client, None)
            self._put_bytes.pop(client, None)

    def admit(self, client: int, message: Submission) -> Submission:
        """Return a request with its features' ids in the prompt, and keep the features while it lives.

        Errors: InvalidRequestError if the engine does not support features, or not these, or they are missing.
        """
        if self._refusal:
            raise InvalidRequestError(self._refusal)
        uses = message.features
        ids = np.frombuffer(message.prompt_token_ids, "<i4").copy()
        if len(uses) > MAX_FEATURES:
            raise InvalidRequestError(f"the request has {len(uses)} features; at most {MAX_FEATURES} are allowed")
        if self._num_numbered + len(uses) > _MAX_NUMBERED:
            raise InvalidRequestError("this engine has used up all feature ids: restart it")
        end = 0
        with self._lock:
            self._held.settle()
            for use in uses:
                if not end <= use.position < use.position + use.num_rows <= len(ids):
                    raise InvalidRequestError(
                        f"a feature replaces {use.num_rows} tokens from {use.position} on: features must be in order, "
                        f"must not overlap, and must be inside the prompt, which has {len(ids)} tokens"
                    )
                end = use.position + use.num_rows
                self._check(client, use)
            uses = [self._described(client, use) for use in uses]
            for use in uses:
                kept = self._put[client][use.digest]
                if use.digest not in self._rows and isinstance(kept, PutFeature):
                    self._wanted[use.digest] = kept
                ids[use.position : use.position + use.num_rows] = -1 - self._number(use.digest)
                self._held.hold(use, use.digest)
                self._idle.pop(use.digest, None)
        return msgspec.structs.replace(message, prompt_token_ids=ids.tobytes(), features=uses)

    def _described(self, client: int, use: FeatureUse) -> FeatureUse:
        """Return the use of a feature that the client has put, with what the scheduler must know of it."""
        kept, encoder = self._put[client][use.digest], self.encoder
        is_encoded = encoder is not None and not isinstance(kept, str) and kept.kind == PIXELS
        is_whole = is_encoded and encoder is not None and encoder.sees_whole
        columns, num_parts = 0, 1
        if is_encoded and encoder and isinstance(kept, PutFeature):
            columns, num_parts = encoder.grid_of(kept.shape)[1], encoder.num_parts(use.num_rows)
        return msgspec.structs.replace(
            use, is_whole=is_whole, is_encoded=is_encoded, num_columns=columns, num_parts=num_parts
        )

    def _check(self, client: int, use: FeatureUse) -> None:
        """Check that this client has put a feature, and that it has as many rows as its request states."""
        put = self._put.get(client)
        kept = None if put is None else put.get(use.digest)
        if kept is None:
            raise InvalidRequestError(
                f"the feature {use.digest.hex()[:16]} is missing: put it before its request; a session keeps the last "
                f"{MAX_SESSION_BYTES} bytes, or {MAX_FEATURES} features, that it has put"
            )
        if isinstance(kept, str):
            raise InvalidRequestError(kept)
        if (num_rows := self._num_rows(kept.kind, kept.shape, len(kept.data))) != use.num_rows:
            raise InvalidRequestError(f"a feature has {num_rows} rows but replaces {use.num_rows} tokens")

    def _num_rows(self, kind: str, shape: list[int], size: int) -> int:
        """Return the rows of a feature. size: its bytes. Errors: InvalidRequestError."""
        if kind not in ITEM_BYTES:
            raise InvalidRequestError(f"a feature's kind must be one of {', '.join(ITEM_BYTES)}; got {kind!r:.80}")
        if min(shape, default=0) < 1 or len(shape) > _MAX_DIMENSIONS or num_bytes(kind, shape) != size:
            raise InvalidRequestError(f"a feature of shape {shape} of {kind} has {size} bytes")
        if kind == EMBEDS:
            if not self._takes_rows:
                raise InvalidRequestError(
                    "this engine takes no prompt_embeds: it pools, or its layers have inputs of their own, made of "
                    "token ids"
                )
            if len(shape) != 2 or shape[1] != self._width:
                raise InvalidRequestError(f"prompt_embeds must have the shape [tokens, {self._width}]; got {shape}")
            return shape[0]
        if self.encoder is None:
            raise InvalidRequestError("this model does not support images: it has no vision encoder")
        return self.encoder.grid_of(shape)[0]

    def _number(self, digest: bytes) -> int:
        number = self._numbers.get(digest)
        if number is None:
            number = self._num_numbered
            self._num_numbered += 1
            self._numbers[digest] = number
            if len(self._numbers) > MAX_NUMBERS:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(digest)
        return number

    # --- preparation ---

    share = 1.0  # it only copies

    def start(self) -> None:
        """Do nothing: everything it needs exists already."""

    def needs(self, message: Submission) -> bool:
        """Return whether rows of the request's embeddings are missing."""
        if not message.features:
            return False
        with self._lock:
            return bool(self._missing(message))

    def prepare(self, message: Submission) -> bool:
        """Convert one more of the request's embeddings. Return whether more are left.

        Errors: InvalidRequestError.
        """
        with self._lock:
            missing = self._missing(message)
            feature = self._wanted[missing[0]] if missing else None
        if feature is None:
            return False
        rows: Floats = np.frombuffer(feature.data, "<f4").reshape(feature.shape).astype(np.float32)
        digest = missing[0]
        if not np.isfinite(rows).all():
            raise InvalidRequestError("a feature of the request has numbers that are not finite")
        with self._lock:
            self._rows[digest] = rows
            if digest not in self._held:
                self._idle[digest] = None
            self._wanted.pop(digest, None)
            self._cached_bytes += rows.nbytes
            self._drop_unheld()
        return any(one != digest for one in missing)

    def close(self) -> None:
        """Do nothing: the features' memory is freed when the process ends."""

    def _missing(self, message: Submission) -> list[bytes]:
        """Return the digests of the request's embeddings without rows. Called with the lock held."""
        return [use.digest for use in message.features if not use.is_encoded and use.digest not in self._rows]

    # --- in steps ---

    def encode(self, digest: bytes) -> None:
        """Encode an image that a live request uses, and keep its rows until drop()."""
        rows = self._rows_of_image(digest)
        with self._lock:
            self._encoded[digest] = rows

    def encode_part(self, digest: bytes, part: int) -> None:
        """Encode an image that a live request uses up to the end of this part, counted from 1.

        After the last part its rows are kept until drop(), as are the results of its parts before that.
        """
        if (run := self._runs.get(digest)) is None:
            encoder, pixels = self._image(digest)
            run = self._runs[digest] = encoder.begin(pixels)
        if (rows := run.advance(part)) is not None:
            self.num_encoded += 1
            with self._lock:
                self._encoded[digest] = rows
            del self._runs[digest]

    def is_encoded(self, digest: bytes) -> bool:
        """Return whether the rows of an image are kept."""
        with self._lock:
            return digest in self._encoded

    def _rows_of_image(self, digest: bytes) -> Floats:
        encoder, pixels = self._image(digest)
        self.num_encoded += 1
        return encoder.encode(pixels)

    def _image(self, digest: bytes) -> tuple[ImageEncoder, UInt8s]:
        """Return the encoder and an image's pixels."""
        with self._lock:
            feature = self._wanted.get(digest)
        assert feature is not None, f"the feature {digest.hex()[:16]} of a running request is gone"
        assert self.encoder is not None, "an image was admitted without an encoder"
        return self.encoder, np.frombuffer(feature.data, np.uint8).reshape(feature.shape)

    def drop(self, digests: Iterable[bytes]) -> None:
        """Free the rows of images, if they are there, and what is made of them in parts."""
        with self._lock:
            for digest in digests:
                self._encoded.pop(digest, None)
                self._runs.pop(digest, None)

    def drop_all(self) -> None:
        """Free the rows of all images."""
        self.drop([*self._encoded, *self._runs])

    def find(self, digest: bytes) -> Floats:
        """Return the rows of a feature that a live request uses.

        An image that no plan has encoded is encoded here, and not kept: a plug-in scheduler may plan none.
        """
        with self._lock:
            rows = self._encoded.get(digest)
            if rows is None:
                rows = self._rows.get(digest)
        return self._rows_of_image(digest) if rows is None else rows

    # --- lives ---

    def _end(self, digest: bytes) -> None:
        """Handle that no request uses this feature any more. Called with the lock held."""
        self._wanted.pop(digest, None)
        if digest in self._rows:
            self._idle[digest] = None
        self._drop_unheld()

    def _drop_unheld(self) -> None:
        """Drop rows that no request uses, least recently used first, while there are too many."""
        while self._cached_bytes > self._max_cached_bytes and self._idle:
            digest, _ = self._idle.popitem(last=False)
            self._cached_bytes -= self._rows.pop(digest).nbytes

    def _drop_oldest(self, client: int) -> None:
        """Drop the client's oldest feature, or if it has none, the one that it has begun."""
        if put := self._put.get(client):
            self._put_bytes[client] -= _bytes_of(put.popitem(last=False)[1])
            if not put:
                del self._put[client]
        else:
            self._put_bytes[client] -= self._begun.pop(client).num_bytes
        if client not in self._put and client not in self._begun:
            del self._put_bytes[client]


def _bytes_of(kept: PutFeature | str) -> int:
    return len(kept) if isinstance(kept, str) else len(kept.data)
