"""Receipts: what is signed, and what comes from strangers."""

import stat
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ipc.errors import ConfigError, InvalidRequestError, ReceiptError
from ipc.keys.signing import SigningKey, check_signature, make_signing_key, read_public_key
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.records import receipt as receipts
from ipc.records.receipt import (
    Answered,
    Receipt,
    VectorHeader,
    ids_bytes,
    make_receipt,
    make_vector_receipt,
    read_receipt,
)
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import AddRequest, Arithmetic, Limits, Welcome
from ipc.wire.pooling_messages import AddPooling

WELCOME = Welcome(
    major=1,
    minor=0,
    server_version="0.1.0",
    engine_id="e",
    epoch=0,
    session_token=b"",
    model_name="a model",
    model_fingerprint="ab" * 32,
    tokenizer_hash="cd" * 32,
    numerics="L2",
    vocab_size=300,
    limits=Limits(512, 8, 1 << 20),
    arithmetic=Arithmetic("ef" * 32, "bfloat16", "head=c-avx2\ndraw=2", "avx2"),
)
PARAMS = SamplingParams(n=2, temperature=0.7, top_p=0.9, max_tokens=None, logit_bias={5: 1.5}, seed=4, logprobs=2)
REQUEST = AddRequest(7, ids_bytes([3, 4, 5]), PARAMS, 2**64 - 1, adapter=AdapterId("0" * 32))
ANSWERS = [Answered([8, 9], "stop"), Answered([10, 11, 12], "length")]


def made(key: SigningKey | None = None, request: AddRequest = REQUEST) -> Receipt:
    return make_receipt(WELCOME, request, ANSWERS, key, created=1_795_000_000)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    path = str(tmp_path_factory.mktemp("keys") / "key")
    assert make_signing_key(path) == read_public_key(f"{path}.pub") == SigningKey(path).public
    return SigningKey(path)


def test_a_receipt_says_all_that_decides_the_tokens(key: SigningKey) -> None:
    one = made(key)
    again = read_receipt(one.to_json())
    assert again == one
    assert again.to_json() == one.to_json()
    again.check_signature()
    again.check_signature([key.public])
    assert again.broken_digests() == []
    request = again.request()
    assert (request.prompt_token_ids, request.seed, request.adapter) == (
        REQUEST.prompt_token_ids,
        REQUEST.seed,
        REQUEST.adapter,
    )
    assert request.params == PARAMS.changed(seed=None, logprobs=None)
    assert one.contents is not None
    assert one.contents.parameters == {
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": None,
        "logit_bias": {"5": 1.5},
    }
    assert (one.header.weights, one.header.variant) == ("ef" * 32, "head=c-avx2\ndraw=2")


def test_what_is_shown_without_contents_says_nothing_of_them(key: SigningKey) -> None:
    shown = read_receipt(made(key).without_contents().to_json())
    shown.check_signature([key.public])
    assert shown.contents is None
    assert shown.broken_digests() == []
    first, second = made(key).header, made(key).header
    for name in ("prompt", "parameters", "answers"):
        assert getattr(first, name) != getattr(second, name), "equal contents cannot be recognised: each has its salt"


@pytest.mark.parametrize(
    "given",
    [
        {"structured_outputs": StructuredOutputsParams(json={"type": "object"}), "stop_token_ids": [4]},
        {"stop": ["a", "b"], "include_stop_str_in_output": True, "min_tokens": 3},
        {"bad_words_token_ids": [[1], [2, 3]], "allowed_token_ids": [4, 5], "ignore_eos": True},
        {"xtc_probability": 0.5, "top_n_sigma": 1.5, "repetition_penalty": 1.1, "top_k": 4, "min_p": 0.1},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_parameters_come_back(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    answers = [Answered([8], "stop")]
    one = make_receipt(WELCOME, msgspec.structs.replace(REQUEST, params=params), answers)
    assert read_receipt(one.to_json()).request().params == params


def test_a_damaged_signature_and_a_wrong_key_are_refused(key: SigningKey, tmp_path: Path) -> None:
    one = made(key)
    make_signing_key(str(tmp_path / "other"))
    other = SigningKey(str(tmp_path / "other"))
    for changed in (
        {"signature": one.signature[:-1] + ("0" if one.signature[-1] != "0" else "1")},
        {"signature": one.signature[:64]},
        {"signature": ""},
        {"signature": "0"},
        {"public_key": other.public},
        {"public_key": ""},
        {"header": msgspec.structs.replace(one.header, seed="00" * 8)},
        {"header": msgspec.structs.replace(one.header, answers=one.header.answers[::-1])},
    ):
        with pytest.raises(ReceiptError, match="the signature is not that of key"):
            msgspec.structs.replace(one, **changed).check_signature()
    with pytest.raises(ReceiptError, match="not among the trusted ones"):
        one.check_signature([other.public])
    with pytest.raises(ReceiptError, match="not signed"):
        made().check_signature([key.public])
    made().check_signature()
    with pytest.raises(ReceiptError):
        check_signature(key.public, one.signature, b"another message")


def test_changed_contents_are_named() -> None:
    one = made()
    assert one.contents is not None
    for changed, names in (
        ({"prompt_token_ids": [3, 4]}, ["prompt"]),
        ({"parameters": {"n": 2}}, ["parameters"]),
        ({"answers": [[8, 9], [10, 11, 13]]}, ["answers"]),
        ({"answers": [[10, 11, 12], [8, 9]]}, ["answers"]),
        ({"answers": [[8, 9]]}, ["answers"]),
        ({"salt": "00" * 32}, ["prompt", "parameters", "answers"]),
    ):
        contents = msgspec.structs.replace(one.contents, **changed)
        assert msgspec.structs.replace(one, contents=contents).broken_digests() == names


def test_a_receipt_names_images_by_their_digests(key: SigningKey) -> None:
    """Without any it has the bytes that it had before there were images in receipts."""
    uses = [FeatureUse(1, 1, b"\1" * 32, is_encoded=True, num_columns=1), FeatureUse(2, 1, b"\2" * 32)]
    one = made(key, msgspec.structs.replace(REQUEST, features=uses))
    again = read_receipt(one.to_json())
    again.check_signature([key.public])
    assert again == one
    assert again.broken_digests() == []
    request = again.request()
    assert isinstance(request, AddRequest)
    assert [(use.position, use.num_rows, use.digest) for use in request.features] == [
        (1, 1, b"\1" * 32),
        (2, 1, b"\2" * 32),
    ]
    assert again.contents is not None
    for features in (again.contents.features[::-1], again.contents.features[:1], []):
        contents = msgspec.structs.replace(again.contents, features=features)
        assert msgspec.structs.replace(again, contents=contents).broken_digests() == ["features"]
    assert b"features" not in made().to_json()
    assert b"01" * 32 not in one.without_contents().to_json()


def test_a_receipt_of_vectors(key: SigningKey) -> None:
    params = PoolingParams(task="token_embed", dimensions=3, use_activation=False, truncate_prompt_tokens=9)
    uses = [FeatureUse(1, 1, b"\2" * 32)]
    asked = AddPooling(7, ids_bytes([3, 4]), params, second_from=1, adapter=AdapterId("0" * 32), features=uses)
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    one = make_vector_receipt(WELCOME, asked, vectors, key, created=1_795_000_000)
    again = read_receipt(one.to_json())
    again.check_signature([key.public])
    assert again == one
    request, header, contents = again.request(), again.header, again.contents
    assert request == AddPooling(
        0,
        asked.prompt_token_ids,
        PoolingParams(task="token_embed", dimensions=3, use_activation=False),
        second_from=1,
        adapter=asked.adapter,
        features=uses,
    )
    other = make_vector_receipt(WELCOME, msgspec.structs.replace(asked, features=[]), vectors, key)
    assert (header.features != "", b"features" in other.to_json()) == (True, False)
    assert isinstance(header, VectorHeader)
    assert contents is not None
    assert (header.num_vectors, header.width, again.broken_digests()) == (2, 3, [])
    assert header.has_vectors(contents, vectors)
    assert not header.has_vectors(contents, vectors.reshape(3, 2))
    assert not header.has_vectors(contents, np.copysign(vectors, -1))
    assert b"answers" not in one.to_json()
    as_tokens = one.to_json().replace(b"engine-core receipt of vectors 1", b"engine-core receipt 1")
    with pytest.raises(ReceiptError, match="not a receipt"):
        read_receipt(as_tokens)
    own = msgspec.structs.replace(WELCOME, numerics="L0")
    with pytest.raises(InvalidRequestError, match="receipts need L2"):
        make_vector_receipt(own, asked, vectors)


def test_malformed_receipts_are_typed_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    good = msgspec.json.decode(made().to_json())
    for path, value in (
        (("header", "form"), "engine-core receipt 2"),
        (("header", "numerics"), "L0"),
        (("header", "seed"), "-1"),
        (("header", "weights"), 5),
        (("header", "model"), "m" * 2000),
        (("header", "answers"), []),
        (("header", "surplus"), 1),
        (("contents", "salt"), "xyz"),
        (("contents", "prompt_token_ids"), [-1]),
        (("contents", "prompt_token_ids"), [2**31]),
        (("contents", "prompt_token_ids"), ["3"]),
        (("contents", "answers"), [[1]] * 129),
        (("contents", "features"), [{"position": -1, "num_rows": 1, "digest": "00" * 32}]),
        (("contents", "features"), [{"position": 1, "num_rows": 1, "digest": "00" * 31}]),
        (("header", "features"), 5),
        (("surplus",), 1),
        (("signature",), "zz"),
    ):
        bad = msgspec.json.decode(msgspec.json.encode(good))
        place = bad
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        with pytest.raises(ReceiptError, match="not a receipt: "):
            read_receipt(msgspec.json.encode(bad))
    for data in (b"", b"[]", b"{}", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(ReceiptError, match="not a receipt: "):
            read_receipt(data)
    monkeypatch.setattr(receipts, "MAX_RECEIPT_BYTES", 100)
    with pytest.raises(ReceiptError, match="at most 100 bytes"):
        read_receipt(made().to_json())


@pytest.mark.parametrize(
    "parameters",
    [
        {"seed": 1},
        {"logprobs": 1},
        {"__class__": "x"},
        {"temperature": "hot"},
        {"temperature": -1},
        {"structured_outputs": {"regex": 5}},
        {"stop_token_ids": list(range(200_000))},
        {"n": 3},
    ],
    ids=lambda one: str(one)[:40],
)
def test_parameters_of_strangers_are_checked(parameters: dict[str, Any]) -> None:
    one = made()
    assert one.contents is not None
    contents = msgspec.structs.replace(one.contents, parameters=parameters)
    with pytest.raises(ReceiptError):
        msgspec.structs.replace(one, contents=contents).request()


@pytest.mark.parametrize(
    ("welcome", "request_", "why"),
    [
        ({"numerics": "L0"}, {}, "receipts need L2"),
        ({"arithmetic": None}, {}, "which weights and kernels"),
        ({}, {"params": SamplingParams()}, "it has not ended"),
    ],
)
def test_answers_that_nobody_could_compute_again_have_none(
    welcome: dict[str, Any], request_: dict[str, Any], why: str
) -> None:
    own = msgspec.structs.replace(WELCOME, **welcome)
    with pytest.raises(InvalidRequestError, match=why):
        make_receipt(own, msgspec.structs.replace(REQUEST, **request_), ANSWERS)
    with pytest.raises(InvalidRequestError, match="it has not ended"):
        make_receipt(WELCOME, REQUEST, [Answered([8], None), Answered([8], "stop")])


def test_keys_are_files_that_openssl_knows(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    public = make_signing_key(path)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="File exists"):
        make_signing_key(path)
    words = ["openssl", "pkey", "-in", path, "-pubout", "-outform", "DER"]
    try:
        done = subprocess.run(words, capture_output=True, check=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no openssl here")
    assert done.stdout[-32:].hex() == public
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        SigningKey(path)
    with pytest.raises(ConfigError, match="no public Ed25519 key"):
        read_public_key(path)
    (tmp_path / "key.pub").chmod(0o600)
    with pytest.raises(ConfigError, match="no private Ed25519 key"):
        SigningKey(f"{path}.pub")
    for read in (SigningKey, read_public_key):
        with pytest.raises(ConfigError, match="No such file"):
            read(str(tmp_path / "none"))


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    for call in (make_signing_key, SigningKey, read_public_key):
        with pytest.raises(ConfigError, match=r"engine-core with its extra \[receipts\]"):
            call(str(tmp_path / "key"))
    made().check_signature()
