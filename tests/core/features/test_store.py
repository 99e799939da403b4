"""The features of an engine: bounds, lives, numbers, and what is said about wrong ones."""

import gc
from typing import Any

import msgspec
import numpy as np
import pytest

from core.features import store
from core.features.store import Features
from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Floats, UInt8s
from ipc.wire import feature_messages
from ipc.wire.feature_messages import FeatureUse, PutFeature, feature_digest, parts_of
from ipc.wire.messages import AddRequest
from ipc.wire.placed_feature import PlacedFeature, placed_embeds
from tests.placed_images import SquareEncoder, placed_image

WIDTH, SIDE, ROWS = 4, 6, 3


class Encoder(SquareEncoder):
    image_size, num_rows, sees_whole, width = SIDE, ROWS, False, WIDTH

    def __init__(self) -> None:
        self.seen: list[int] = []

    def encode(self, pixels: UInt8s) -> Floats:
        assert pixels.shape == (SIDE, SIDE, 3)
        self.seen.append(int(pixels[0, 0, 0]))
        return np.full((ROWS, WIDTH), pixels[0, 0, 0], np.float32)


def embeds(value: float, rows: int = 2, at: int = 0) -> PlacedFeature:
    (placed,) = placed_embeds(np.full((rows, WIDTH), value, np.float32), at)
    return placed


def image(value: int, at: int = 0) -> PlacedFeature:
    return placed_image(np.full((SIDE, SIDE, 3), value, np.uint8), at, ROWS)


def asks(*placed: PlacedFeature, length: int = 12) -> AddRequest:
    uses = [FeatureUse(*(getattr(one.use, name) for name in FeatureUse.__struct_fields__)) for one in placed]
    ids = np.arange(length, dtype="<i4").tobytes()
    return AddRequest(0, ids, SamplingParams(), 0, features=uses)


def ids_of(message: AddRequest) -> list[int]:
    return np.frombuffer(message.prompt_token_ids, "<i4").tolist()


class WholeEncoder(Encoder):
    sees_whole = True


def test_images_are_whole_where_the_model_says_so_and_whatever_a_client_says() -> None:
    for encoder, is_whole in ((Encoder(), False), (WholeEncoder(), True)):
        features = Features(WIDTH, encoder)
        for placed in (embeds(1.0), image(3)):
            features.put(1, placed.feature)
        message = asks(embeds(1.0, at=1), image(3, at=5))
        claimed = [msgspec.structs.replace(use, is_whole=True, is_encoded=True) for use in message.features]
        for given in (message, msgspec.structs.replace(message, features=claimed)):
            admitted = features.admit(1, given)
            assert [use.is_whole for use in admitted.features] == [False, is_whole]
            assert [use.is_encoded for use in admitted.features] == [False, True]
            del admitted


class EncoderInParts(Encoder):
    """Its runs have three parts."""

    def num_parts(self, num_rows: int) -> int:
        return 3

    def begin(self, pixels: UInt8s) -> "EncoderInParts":
        self.pixels, self.parts = pixels, list[int]()
        return self

    def advance(self, part: int) -> Floats | None:
        self.parts.append(part)
        return self.encode(self.pixels) if part == 3 else None


def test_an_image_in_parts_whatever_a_client_says() -> None:
    features = Features(WIDTH, encoder := EncoderInParts())
    for placed in (embeds(1.0), image(3)):
        features.put(1, placed.feature)
    asked = asks(embeds(1.0, at=1), image(3, at=5))
    claimed = [msgspec.structs.replace(use, num_parts=7) for use in asked.features]
    message = features.admit(1, msgspec.structs.replace(asked, features=claimed))
    assert [use.num_parts for use in message.features] == [1, 3]
    digest = message.features[1].digest
    for part in (1, 2):
        features.encode_part(digest, part)
    assert (encoder.parts, features.num_encoded) == ([1, 2], 0)
    features.drop([digest])  # the next part begins a run that has none of these
    features.encode_part(digest, 3)
    assert (encoder.parts, features.num_encoded) == ([3], 1)
    assert (features.find(digest) == 3).all()
    assert features.num_encoded == 1


def test_tokens_of_features_have_the_numbers_of_their_content() -> None:
    features = Features(WIDTH, Encoder())
    for placed in (embeds(1.0), embeds(2.0), image(3)):
        features.put(1, placed.feature)
    first = features.admit(1, asks(embeds(1.0, at=1), image(3, at=5)))
    assert ids_of(first) == [0, -1, -1, 3, 4, -2, -2, -2, 8, 9, 10, 11]
    again = features.admit(1, asks(image(3), embeds(2.0, at=3), embeds(1.0, at=5)))
    assert ids_of(again)[:7] == [-2, -2, -2, -3, -3, -1, -1]


def test_an_image_is_encoded_when_a_plan_says_so_and_kept_until_one_drops_it() -> None:
    features = Features(WIDTH, encoder := Encoder())
    features.put(1, image(7).feature)
    message = features.admit(1, asks(image(7), image(7, at=5)))
    assert not features.needs(message)  # nothing before the step
    features.forget(1)  # the request keeps the pixels
    digest = message.features[0].digest
    for count in (1, 2):
        features.encode(digest)
        for _ in range(3):
            assert (features.find(digest) == 7).all()
        assert features.num_encoded == count
        features.drop([digest, b"unknown"])
    features.encode(digest)
    features.drop_all()
    for count in (4, 5):  # no plan says anything, as a plug-in scheduler's
        assert (features.find(digest) == 7).all()
        assert features.num_encoded == count
    del message
    gc.collect()
    with pytest.raises(AssertionError, match="is gone"):
        features.encode(digest)
    assert encoder.seen == [7] * 5


def parts(placed: PlacedFeature, monkeypatch: pytest.MonkeyPatch, size: int = 50) -> list[PutFeature]:
    monkeypatch.setattr(feature_messages, "PART_BYTES", size)
    return list(parts_of(placed.feature))


def bytes_put(features: Features, client: int) -> int:
    """Bytes that a client has put and that are kept, with those of a feature that it has begun."""
    return features._put_bytes.get(client, 0)


def test_a_feature_in_parts_is_the_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    features, given = Features(WIDTH, Encoder()), parts(image(7), monkeypatch)
    assert [(len(part.data), part.left) for part in given] == [(50, 58), (50, 8), (8, 0)]
    for part in given[:-1]:
        features.put(1, part)
        with pytest.raises(InvalidRequestError, match="is missing"):
            features.admit(1, asks(image(7)))
    features.put(1, given[-1])
    message = features.admit(1, asks(image(7)))
    assert (features.find(message.features[0].digest) == 7).all()
    assert bytes_put(features, 1) == 3 * SIDE**2


def test_parts_that_do_not_follow_each_other_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = parts(image(7), monkeypatch)
    for order in ([first, third], [first, first, second], [second, third], [first, image(5).feature, second, third]):
        features = Features(WIDTH, Encoder())
        for part in order:
            features.put(1, part)
        with pytest.raises(InvalidRequestError, match="is missing"):
            features.admit(1, asks(image(7)))
        features.forget(1)
        assert bytes_put(features, 1) == 0


def test_a_feature_that_is_refused_is_not_kept_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    large = placed_image(np.zeros((SIDE, 5 * SIDE, 3), np.uint8), 0, ROWS)
    features = Features(WIDTH, Encoder())
    for part in parts(large, monkeypatch):
        features.put(1, part)
        assert 0 <= bytes_put(features, 1) < 200
    with pytest.raises(InvalidRequestError, match=r"must have the shape \[6, 6, 3\]"):
        features.admit(1, asks(large))
    features.put(1, PutFeature("embeds", [1 << 40, WIDTH], b"1234", 16 * (1 << 40) - 4))
    assert bytes_put(features, 1) < 200


def test_what_is_begun_counts_and_is_dropped_last(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = parts(image(7), monkeypatch)
    monkeypatch.setattr(store, "MAX_SESSION_BYTES", 200)
    features = Features(WIDTH, Encoder())
    for feature in (image(1).feature, first, second):
        features.put(1, feature)
    assert bytes_put(features, 1) == 100  # the first image gave way
    monkeypatch.setattr(store, "MAX_PUT_BYTES", 180)
    features.put(2, image(2).feature)
    assert (bytes_put(features, 1), bytes_put(features, 2)) in ((100, 0), (0, 108))
    features.put(1, third)
    assert {bytes_put(features, 1), bytes_put(features, 2)} <= {108, 8, 0}


def test_another_client_has_not_what_this_one_has_put() -> None:
    features = Features(WIDTH)
    features.put(1, embeds(1.0).feature)
    with pytest.raises(InvalidRequestError, match="is missing: put it before"):
        features.admit(2, asks(embeds(1.0)))
    features.forget(1)
    with pytest.raises(InvalidRequestError, match="is missing"):
        features.admit(1, asks(embeds(1.0)))


def test_rows_that_are_here_serve_only_who_has_put_them() -> None:
    """Nobody learns of another client's images by asking for them."""
    features = Features(WIDTH, Encoder())
    features.put(1, image(7).feature)
    message = features.admit(1, asks(image(7)))
    features.encode(message.features[0].digest)
    with pytest.raises(InvalidRequestError, match="is missing"):
        features.admit(2, asks(image(7)))


def test_a_shape_without_end_is_not_kept() -> None:
    features = Features(WIDTH)
    endless = PutFeature("embeds", [1] * 1_000_000, b"")
    features.put(1, endless)
    use = FeatureUse(0, 1, feature_digest(endless.kind, endless.shape, endless.data))
    with pytest.raises(InvalidRequestError, match="is missing") as failure:
        features.admit(1, AddRequest(0, bytes(8), SamplingParams(), 0, features=[use]))
    assert len(str(failure.value)) < 300


def test_a_session_keeps_so_many_features_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_FEATURES", 3)
    features = Features(WIDTH)
    for value in range(5):
        features.put(1, embeds(value).feature)
    for value in (2.0, 3.0, 4.0):
        features.admit(1, asks(embeds(value)))
    with pytest.raises(InvalidRequestError, match="is missing"):
        features.admit(1, asks(embeds(1.0)))


def test_rows_go_in_the_order_in_which_they_became_idle() -> None:
    features = Features(WIDTH, max_cached_bytes=2 * 4 * WIDTH * ROWS)
    for value in (1, 2, 3):
        features.put(1, embeds(value, ROWS).feature)
    held = features.admit(1, asks(embeds(1, ROWS)))
    for value in (1, 2, 1, 3):  # 2 gives way to 3; 1 is held
        features.prepare(features.admit(1, asks(embeds(value, ROWS))))
    gc.collect()
    features.put(1, embeds(1, ROWS).feature)
    for value, is_there in ((1, True), (3, True), (2, False)):
        message = features.admit(1, asks(embeds(value, ROWS)))
        assert features.needs(message) != is_there, value
        del message
    del held


def test_embeddings_are_prepared_one_at_a_time() -> None:
    features = Features(WIDTH, Encoder())
    for placed in (embeds(1), embeds(2), image(3)):
        features.put(1, placed.feature)
    message = features.admit(1, asks(embeds(1), embeds(2, at=3), image(3, at=5), embeds(1, at=8)))
    assert [features.prepare(message) for _ in range(3)] == [True, False, False]
    assert features.num_encoded == 0


def test_an_image_counts_with_its_pixels() -> None:
    features = Features(WIDTH, Encoder())
    assert features.num_bytes(asks(image(1), embeds(1, at=5))) == 3 * SIDE * SIDE + 2 * 4 * WIDTH
    assert features.num_bytes(asks(embeds(1, 50), length=60)) == 50 * 4 * WIDTH


def test_a_request_keeps_what_it_was_admitted_with() -> None:
    features = Features(WIDTH, max_cached_bytes=0)
    features.put(1, embeds(1.0).feature)
    message = features.admit(1, asks(embeds(1.0)))
    features.forget(1)
    features.prepare(message)
    digest = message.features[0].digest
    features.put(2, embeds(2.0).feature)
    features.prepare(features.admit(2, asks(embeds(2.0))))
    assert (features.find(digest) == 1).all()
    del message
    gc.collect()
    features.put(2, embeds(3.0).feature)
    features.prepare(features.admit(2, asks(embeds(3.0))))  # ends are counted
    with pytest.raises(AssertionError, match="is gone"):
        features.find(digest)


def test_a_session_keeps_its_last_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_SESSION_BYTES", 100)  # three of 32 bytes
    features = Features(WIDTH)
    for value in (1.0, 2.0, 3.0, 1.0, 4.0):  # 1.0 is put again, so 2.0 is the oldest
        features.put(1, embeds(value).feature)
    for value in (1.0, 3.0, 4.0):
        features.admit(1, asks(embeds(value)))
    with pytest.raises(InvalidRequestError, match="is missing"):
        features.admit(1, asks(embeds(2.0)))


def test_the_largest_client_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_PUT_BYTES", 100)
    features = Features(WIDTH)
    features.put(1, embeds(1.0).feature)
    for value in (2.0, 3.0, 4.0):
        features.put(2, embeds(value).feature)
    features.admit(1, asks(embeds(1.0)))
    with pytest.raises(InvalidRequestError, match="is missing"):
        features.admit(2, asks(embeds(2.0)))


def test_a_feature_that_is_forgotten_gets_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_NUMBERS", 1)
    features = Features(WIDTH)
    for value in (1.0, 2.0):
        features.put(1, embeds(value).feature)
    numbers = [ids_of(features.admit(1, asks(embeds(value))))[0] for value in (1.0, 1.0, 2.0, 1.0)]
    assert numbers == [-1, -1, -2, -3]


def put(features: Features, kind: str, shape: list[int], data: bytes) -> AddRequest:
    features.put(1, PutFeature(kind, shape, data))
    use = FeatureUse(0, 2, feature_digest(kind, shape, data))
    return AddRequest(0, bytes(48), SamplingParams(), 0, features=[use])


WRONG: list[tuple[str, list[int], int, str]] = [
    ("sounds", [2, 4], 32, "kind must be one of embeds, pixels; got 'sounds'"),
    ("embeds", [2, 4], 31, r"of shape \[2, 4\] of embeds has 31 bytes"),
    ("embeds", [2, -4], 32, r"of shape \[2, -4\]"),
    ("embeds", [], 32, r"of shape \[\]"),
    ("embeds", [1, 2, 4], 32, r"have the shape \[tokens, 4\]; got \[1, 2, 4\]"),
    ("embeds", [2, 5], 40, r"have the shape \[tokens, 4\]; got \[2, 5\]"),
    ("embeds", [3, 4], 48, "has 3 rows but replaces 2 tokens"),
    ("pixels", [6, 6, 3], 108, "has 3 rows but replaces 2 tokens"),
    ("pixels", [6, 5, 3], 90, r"have the shape \[6, 6, 3\]; got \[6, 5, 3\]"),
]


@pytest.mark.parametrize(("kind", "shape", "size", "text"), WRONG)
def test_wrong_features_are_said_to_their_request(kind: str, shape: list[int], size: int, text: str) -> None:
    features = Features(WIDTH, Encoder())
    message = put(features, kind, shape, bytes(size))
    with pytest.raises(InvalidRequestError, match=text):
        features.admit(1, message)


def test_images_need_an_encoder() -> None:
    features = Features(WIDTH)
    message = put(features, "pixels", [6, 6, 3], bytes(108))
    with pytest.raises(InvalidRequestError, match="does not support images"):
        features.admit(1, message)


@pytest.mark.parametrize("places", [(11,), (-1,), (0, 1), (4, 0), (2**31,)])
def test_wrong_places(places: tuple[int, ...]) -> None:
    features = Features(WIDTH)
    features.put(1, embeds(1.0).feature)
    with pytest.raises(
        InvalidRequestError, match="features must be in order, must not overlap, and must be inside the prompt"
    ):
        features.admit(1, asks(*(embeds(1.0, at=at) for at in places)))


def test_numbers_that_are_not_finite() -> None:
    features = Features(WIDTH)
    placed = embeds(float("nan"))
    features.put(1, placed.feature)
    message = features.admit(1, asks(placed))
    with pytest.raises(InvalidRequestError, match="not finite"):
        features.prepare(message)


def test_too_many() -> None:
    features: Any = Features(WIDTH)
    with pytest.raises(InvalidRequestError, match="has 4097 features; at most 4096"):
        features.admit(1, asks(*[embeds(1.0)] * 4097))


def test_a_refusal_is_said() -> None:
    features = Features(WIDTH, refusal="not here")
    assert features.limits is None
    with pytest.raises(InvalidRequestError, match="not here"):
        features.admit(1, asks(embeds(1.0)))
