"""Messages on features: rows of numbers that replace tokens of a prompt, given directly or made from pixels."""

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec

#: Kinds of features: rows [rows, hidden] float32, little-endian, which replace the embeddings of tokens; ...
EMBEDS = "embeds"
#: ... and an image [height, width, 3] uint8 of the model's size, from which its vision encoder makes rows.
PIXELS = "pixels"
#: Bytes of one number of each kind.
ITEM_BYTES = {EMBEDS: 4, PIXELS: 1}
DIGEST_BYTES = 32
#: Most pixels of an image.
MAX_IMAGE_PIXELS = 32 << 20
#: Bytes of a feature that one message carries; larger features are put in several.
PART_BYTES = 4 << 20
#: Most features of one request.
MAX_FEATURES = 4096
_Shape = Annotated[list[int], msgspec.Meta(max_length=8)]  # at most 3 are valid


class PutFeature(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Give the engine a feature, for later requests of this session that name its digest. It has no answer.

    The engine keeps at most FeatureLimits.max_bytes of a session's features: beyond it the oldest are dropped. Errors
    in a feature are reported for the request that names it.
    """

    kind: str  # EMBEDS or PIXELS
    shape: _Shape
    data: bytes
    #: Bytes of the feature that the next PutFeatures of this session carry. They have its kind and shape too.
    left: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 0


class FeatureUse(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """A feature in a prompt, by its content. The engine keeps it as long as such an object of a request exists."""

    position: int  # of the first token that it replaces; the prompt's ids there do not matter
    num_rows: int  # tokens that it replaces
    digest: bytes  # feature_digest() of it
    #: Its tokens attend to each other, so one step computes them. The engine sets it, whatever a client says.
    is_whole: bool = False
    #: Its rows are computed from an image, in the step that needs them. The engine sets it too.
    is_encoded: bool = False
    #: Columns of the grid that its rows form, for models whose tokens have three positions; 0 = its tokens have one
    #: each, like those of text. The engine sets it too.
    num_columns: int = 0
    #: Steps over which its encoding is spread, because other requests would wait for it too long; 1 = one step encodes
    #: it whole. The engine sets it too.
    num_parts: int = 1


#: Those of a request; their number is checked before they are decoded.
FeatureUses = Annotated[list[FeatureUse], msgspec.Meta(max_length=MAX_FEATURES)]


class FeatureLimits(msgspec.Struct, frozen=True, array_like=True):
    """The features that an engine accepts."""

    width: int  # numbers of a row
    max_bytes: int  # of the features that a session has put
    #: Height and width of images in pixels, or the number of which both are multiples; 0 = no images are accepted.
    image_size: int = 0
    image_rows: int = 0  # rows that an image becomes; the most if images may have any size
    max_images: int | None = None  # of one prompt; clients obey it. None = no limit
    any_size: bool = False  # see image_size: each square of this size becomes one row
    #: The most rows of an image that is put in several messages; image_rows is what one message carries. 0 = as those.
    rows_in_parts: int = 0

    @property
    def most_rows(self) -> int:
        """Return the most rows that an image may become."""
        return max(self.image_rows, self.rows_in_parts)


def feature_digest(kind: str, shape: Sequence[int], data: bytes) -> bytes:
    """Return the identity of a feature: a digest of its kind, shape and numbers."""
    digest = begin_digest(kind, shape)
    digest.update(data)
    return digest.digest()


def begin_digest(kind: str, shape: Sequence[int]) -> blake2b:
    """Return the digest of a feature whose numbers are not known yet."""
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"engine feature")
    digest.update(f"{kind}:{'x'.join(map(str, shape))}:".encode())
    return digest


def parts_of(feature: PutFeature) -> Iterator[PutFeature]:
    """Yield the messages that put a feature: one, or several of PART_BYTES each if it has more."""
    size = len(feature.data)
    if size <= PART_BYTES:
        yield feature
        return
    for begin in range(0, size, PART_BYTES):
        data = feature.data[begin : begin + PART_BYTES]
        yield PutFeature(feature.kind, feature.shape, data, size - begin - len(data))


def num_bytes(kind: str, shape: Sequence[int]) -> int:
    """Return the bytes of a feature of this kind and shape."""
    return math.prod(shape) * ITEM_BYTES[kind]


def without_ids(prompt_token_ids: bytes, features: Sequence[FeatureUse]) -> bytes:
    """Return a prompt (int32) with token 0 at the positions of its features."""
    ids = bytearray(prompt_token_ids)
    for use in features:
        place = slice(4 * use.position, 4 * (use.position + use.num_rows))
        ids[place] = bytes(len(ids[place]))
    return bytes(ids)
