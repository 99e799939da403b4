"""Receipt: an answer with all that decides its tokens or vectors, so that others can compute it again
(docs/receipts.md).

A receipt has two parts. The header has digests of everything and is what a signature covers. The contents have the
tokens and the parameters, with the salt of the digests. Who holds a receipt may give it on without the contents: the
signature stays good, and says nothing of the conversation. Receipts come from strangers: they are data of bounded size.
Images, embeddings and vectors are not in a receipt, only their digests.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec.structs import FieldInfo

from ipc.errors import InvalidRequestError, ReceiptError
from ipc.keys.signing import SigningKey, check_signature
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import MAX_CHOICES, SamplingParams
from ipc.tables.arrays import Floats
from ipc.wire.feature_messages import MAX_FEATURES, FeatureUse
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import DECODE_ERRORS, AddRequest, Submission, Welcome
from ipc.wire.pooling_messages import AddPooling

#: The form of a receipt of tokens, and of one of vectors.
FORM, VECTOR_FORM = "engine-core receipt 1", "engine-core receipt of vectors 1"
#: Largest receipt, bytes of JSON: a prompt and answers of a million tokens together.
MAX_RECEIPT_BYTES = 8 << 20
_SALT_BYTES = 32
_SECOND_FROM = "second_from"  # of AddPooling, among the parameters
_Params = TypeVar("_Params", SamplingParams, PoolingParams)

_MAX_TOKENS = 1 << 20
_Hex: TypeAlias = Annotated[str, msgspec.Meta(max_length=128, pattern="^[0-9a-f]*$")]
_Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_TokenIds: TypeAlias = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(max_length=_MAX_TOKENS)
]
#: "stop": EOS, a stop token or a stop string; "length": max_tokens or max_model_len; "abort": by the client.
Finish: TypeAlias = Literal["stop", "length", "abort"]

#: Fields of parameters that decide no token and no vector: what is reported, how text is made of tokens, and what is
#: in the header. bad_words are text, and the engine reads their token ids. skip_special_tokens decides where stop
#: strings are.
_UNDECIDING = (
    "seed",
    "logprobs",
    "prompt_logprobs",
    "flat_logprobs",
    "detokenize",
    "spaces_between_special_tokens",
    "output_kind",
    "bad_words",
    "truncate_prompt_tokens",
)


class AnswerDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One choice of an answer, without its tokens."""

    digest: _Digest
    num_tokens: _Count
    finish_reason: Finish


_AnswerDigests: TypeAlias = Annotated[list[AnswerDigest], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]


class _Head(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="form"
):
    """What each receipt says without its contents; the signature covers it. Digests: see digest_of()."""

    created: int  # seconds since 1970
    engine_version: _Name
    model: _Name
    weights: _Name  # hex digest of the model's files, "dummy-" before it if they are made up
    tokenizer: _Hex  # hex digest of its files; "" = there are none
    fingerprint: _Name  # of weights, kernels and arithmetic together
    numerics: Literal["L2"]
    dtype: _Name
    variant: _Name  # of every kernel and summation order
    cpu_kernels: _Name  # the option that selects these kernels
    max_model_len: _Count
    adapter: _Hex  # digest; "" = none
    num_prompt_tokens: _Count
    prompt: _Digest
    parameters: _Digest
    features: _Hex = ""  # digest of Contents.features; "" = the prompt has none

    @property
    def num_computed(self) -> int:
        """Return the number of tokens that are computed to verify it."""
        return self.num_prompt_tokens

    def broken_digests(self, contents: "Contents") -> list[str]:
        """Return the names of the fields whose digests are not those of the contents."""
        salt = bytes.fromhex(contents.salt)
        broken = []
        if self.num_prompt_tokens != len(contents.prompt_token_ids) or self.prompt != digest_of(
            salt, "prompt", ids_bytes(contents.prompt_token_ids)
        ):
            broken.append("prompt")
        if self.parameters != digest_of(salt, "parameters", _canonical(contents.parameters)):
            broken.append("parameters")
        if self.features != _features_digest(salt, contents.features):
            broken.append("features")
        return broken

    @property
    def _adapter_id(self) -> AdapterId | None:
        return AdapterId(self.adapter) if self.adapter else None


class Header(_Head, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=FORM):
    """The header of a receipt of tokens."""

    seed: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # uint64, hexadecimal
    answers: _AnswerDigests

    @property
    def num_computed(self) -> int:
        """Return the number of tokens that are computed to verify it."""
        return sum(self.num_prompt_tokens + one.num_tokens for one in self.answers)

    def broken_digests(self, contents: "Contents") -> list[str]:
        """Return the names of the fields whose digests are not those of the contents."""
        salt, broken = bytes.fromhex(contents.salt), super().broken_digests(contents)
        if [_answer_digest(salt, *one) for one in enumerate(contents.answers)] != [
            (one.digest, one.num_tokens) for one in self.answers
        ]:
            broken.append("answers")
        return broken

    def request(self, contents: "Contents") -> AddRequest:
        """Return the request that the answers are said to follow from. Errors: ReceiptError."""
        params = _read_params(contents.parameters, _FIELDS, SamplingParams)
        if not len(contents.answers) == len(self.answers) == params.n:
            raise ReceiptError(f"the receipt has {len(contents.answers)} answers, and n={params.n}")
        prompt, seed = ids_bytes(contents.prompt_token_ids), int(self.seed, 16)
        return AddRequest(0, prompt, params, seed, adapter=self._adapter_id, features=_uses(contents))


class VectorHeader(_Head, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=VECTOR_FORM):
    """The header of a receipt of vectors."""

    vectors: _Digest
    num_vectors: _Count
    width: _Count  # numbers of each

    def request(self, contents: "Contents") -> AddPooling:
        """Return the request that the vectors are said to follow from. Errors: ReceiptError."""
        given = dict(contents.parameters)
        second_from = given.pop(_SECOND_FROM, 0)
        if type(second_from) is not int:
            raise ReceiptError(f"parameters of the receipt: {_SECOND_FROM} is {second_from!r:.80}, and no integer")
        params = _read_params(given, _POOLING_FIELDS, PoolingParams)
        prompt = ids_bytes(contents.prompt_token_ids)
        adapter, uses = self._adapter_id, _uses(contents)
        return AddPooling(0, prompt, params, second_from=second_from, adapter=adapter, features=uses)

    def has_vectors(self, contents: "Contents", vectors: Floats) -> bool:
        """Return whether these vectors [num_vectors, width] float32 have the header's digest: they have equal bits."""
        digest = _vectors_digest(bytes.fromhex(contents.salt), vectors)
        return (self.num_vectors, self.width) == vectors.shape and self.vectors == digest


class UsedFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image, or a part of one, or embeddings in a prompt. digest: feature_digest() of it, hexadecimal."""

    position: _Count  # of the first token that it replaces
    num_rows: _Count  # tokens that it replaces
    digest: _Digest


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The tokens and the parameters, and the salt of their digests."""

    salt: _Digest
    prompt_token_ids: _TokenIds
    parameters: dict[_Name, Any]  # fields of SamplingParams or PoolingParams that are not at their defaults
    answers: Annotated[list[_TokenIds], msgspec.Meta(max_length=MAX_CHOICES)] = []  # of vectors: none
    features: Annotated[list[UsedFeature], msgspec.Meta(max_length=MAX_FEATURES)] = []  # of the prompt, in order


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A receipt. public_key, signature: hexadecimal; "" = it is not signed. contents: None = they are withheld."""

    header: Header | VectorHeader
    contents: Contents | None = None
    public_key: _Hex = ""
    signature: _Hex = ""

    def to_json(self) -> bytes:
        """Return the receipt as canonical JSON: keys sorted, no white space."""
        return _canonical(self)

    def without_contents(self) -> "Receipt":
        """Return the receipt without tokens and parameters; the signature stays good."""
        return msgspec.structs.replace(self, contents=None)

    def check_signature(self, trusted: Sequence[str] = ()) -> None:
        """Check the signature, and that it is by one of these public keys; without any, by the receipt's own.

        A receipt without a signature passes if no keys are given. Errors: ReceiptError.
        """
        if trusted and not self.signature:
            raise ReceiptError("the receipt is not signed, and a signature by a trusted key is asked for")
        if trusted and self.public_key not in trusted:
            raise ReceiptError(
                f"the receipt is signed by key {self.public_key:.16}, which is not among the trusted ones"
            )
        if self.signature or self.public_key:
            check_signature(self.public_key, self.signature, _signed_bytes(self.header))

    def broken_digests(self) -> list[str]:
        """Return the names of the header's fields whose digests are not those of the contents."""
        return [] if self.contents is None else self.header.broken_digests(self.contents)

    def request(self) -> Submission:
        """Return the request that the answers are said to follow from. Errors: ReceiptError."""
        assert self.contents is not None, "the contents are withheld"
        return self.header.request(self.contents)


class Answered(NamedTuple):
    """One choice of an answer."""

    token_ids: Sequence[int]
    finish_reason: str | None


def make_receipt(
    welcome: Welcome,
    request: AddRequest,
    answers: Sequence[Answered],
    key: SigningKey | None = None,
    created: int | None = None,
) -> Receipt:
    """Return the receipt of an engine's answers to a request. key: signs it. created: None = now.

    Errors: InvalidRequestError, if the answer is one of which no receipt can be made.
    """
    check_provable(welcome)
    if len(answers) != request.params.n or any(one.finish_reason not in _FINISHES for one in answers):
        raise InvalidRequestError(f"{_NO_RECEIPT}: it has not ended, or is a part of an answer (output_kind DELTA)")
    parameters = _deciding(request.params, _DEFAULTS)
    if not request.params.stop_strings:
        parameters.pop("skip_special_tokens", None)
    contents = Contents(
        secrets.token_hex(_SALT_BYTES),
        np.frombuffer(request.prompt_token_ids, "<i4").tolist(),
        parameters,
        [list(one.token_ids) for one in answers],
        _used(request),
    )
    salt = bytes.fromhex(contents.salt)
    digests = [_answer_digest(salt, *one) for one in enumerate(contents.answers)]
    header = Header(
        **_head_fields(welcome, request, contents, created),
        seed=f"{request.seed:016x}",
        answers=[
            AnswerDigest(*digest, one.finish_reason)  # type: ignore[arg-type]
            for digest, one in zip(digests, answers, strict=True)
        ],
    )
    return _signed(header, contents, key)


def make_vector_receipt(
    welcome: Welcome,
    request: AddPooling,
    vectors: Floats,
    key: SigningKey | None = None,
    created: int | None = None,
) -> Receipt:
    """Return the receipt of the vectors [n, width] float32 that an engine has answered a request with.

    key, created, errors: see make_receipt().
    """
    check_provable(welcome)
    parameters = _deciding(request.params, _POOLING_DEFAULTS)
    if request.second_from:
        parameters[_SECOND_FROM] = request.second_from
    prompt = np.frombuffer(request.prompt_token_ids, "<i4").tolist()
    contents = Contents(secrets.token_hex(_SALT_BYTES), prompt, parameters, features=_used(request))
    header = VectorHeader(
        **_head_fields(welcome, request, contents, created),
        vectors=_vectors_digest(bytes.fromhex(contents.salt), vectors),
        num_vectors=len(vectors),
        width=vectors.shape[1],
    )
    return _signed(header, contents, key)


def _head_fields(welcome: Welcome, request: Submission, contents: Contents, created: int | None) -> dict[str, Any]:
    """Return the fields that all headers have."""
    arithmetic, salt = welcome.arithmetic, bytes.fromhex(contents.salt)
    assert arithmetic is not None
    return {
        "created": int(time.time()) if created is None else created,
        "engine_version": welcome.server_version,
        "model": welcome.model_name[:1024],
        "weights": arithmetic.weights,
        "tokenizer": welcome.tokenizer_hash,
        "fingerprint": welcome.model_fingerprint,
        "numerics": "L2",
        "dtype": arithmetic.dtype,
        "variant": arithmetic.variant,
        "cpu_kernels": arithmetic.cpu_kernels,
        "max_model_len": welcome.limits.max_model_len,
        "adapter": "" if request.adapter is None else request.adapter.digest,
        "num_prompt_tokens": len(contents.prompt_token_ids),
        "prompt": digest_of(salt, "prompt", request.prompt_token_ids),
        "parameters": digest_of(salt, "parameters", _canonical(contents.parameters)),
        "features": _features_digest(salt, contents.features),
    }


def _signed(header: Header | VectorHeader, contents: Contents, key: SigningKey | None) -> Receipt:
    if key is None:
        return Receipt(header, contents)
    return Receipt(header, contents, key.public, key.sign(_signed_bytes(header)))


def read_receipt(data: bytes) -> Receipt:
    """Return the receipt of this JSON. Errors: ReceiptError that says what is wrong with it."""
    if len(data) > MAX_RECEIPT_BYTES:
        raise ReceiptError(f"a receipt has at most {MAX_RECEIPT_BYTES} bytes, and this one has {len(data)}")
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ReceiptError(f"not a receipt: {error}") from None


def digest_of(salt: bytes, name: str, data: bytes) -> str:
    """Return the salted digest of a part of the contents: HMAC-SHA-256 of its name, a zero byte and its bytes."""
    return hmac.digest(salt, name.encode() + b"\0" + data, hashlib.sha256).hex()


def ids_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as int32, little-endian."""
    return np.array(token_ids, "<i4").tobytes()


def _answer_digest(salt: bytes, index: int, token_ids: Sequence[int]) -> tuple[str, int]:
    return digest_of(salt, f"answer {index}", ids_bytes(token_ids)), len(token_ids)


def _features_digest(salt: bytes, features: Sequence[UsedFeature]) -> str:
    return digest_of(salt, "features", _canonical(features)) if features else ""


def _used(request: Submission) -> list[UsedFeature]:
    return [UsedFeature(use.position, use.num_rows, use.digest.hex()) for use in request.features]


def _uses(contents: Contents) -> list[FeatureUse]:
    return [FeatureUse(one.position, one.num_rows, bytes.fromhex(one.digest)) for one in contents.features]


def _vectors_digest(salt: bytes, vectors: Floats) -> str:
    return digest_of(salt, "vectors", vectors.astype("<f4", copy=False).tobytes())


def check_provable(welcome: Welcome) -> None:
    """Check that an engine's answers can have receipts. Errors: InvalidRequestError that says why not."""
    why = ""
    if welcome.numerics != "L2":
        why = f"its engine has numerics level {welcome.numerics}, and receipts need L2: others could get other results"
    elif welcome.arithmetic is None:
        why = "its engine does not say which weights and kernels it computes with"
    if why:
        raise InvalidRequestError(f"{_NO_RECEIPT}: {why}")


def _deciding(params: SamplingParams | PoolingParams, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that decide the answer and are not at their defaults, as JSON has them."""
    return {
        name: msgspec.to_builtins(value, str_keys=True)
        for name, default in defaults.items()
        if (value := getattr(params, name)) != default and value != []
    }


def _read_params(given: Mapping[str, Any], fields: Mapping[str, FieldInfo], kind: type[_Params]) -> _Params:
    """Errors: ReceiptError."""
    try:
        values = {}
        for name, value in given.items():
            if name not in fields:
                raise ReceiptError(f"parameters has {name!r:.80}, which is no parameter that decides the answer")
            values[name] = msgspec.convert(value, fields[name].type, str_keys=True)
        return kind(**values)
    except (msgspec.ValidationError, InvalidRequestError) as error:
        raise ReceiptError(f"parameters of the receipt: {error}") from None


def _signed_bytes(header: Header | VectorHeader) -> bytes:
    return str(header.__struct_config__.tag).encode() + b"\n" + _canonical(header)


def _canonical(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


_decoder = msgspec.json.Decoder(Receipt)
_NO_RECEIPT = "no receipt can be made of this answer"
_FINISHES = ("stop", "length", "abort")
_FIELDS, _POOLING_FIELDS = (
    {field.name: field for field in msgspec.structs.fields(kind) if field.name not in _UNDECIDING}
    for kind in (SamplingParams, PoolingParams)
)
_DEFAULTS, _POOLING_DEFAULTS = (
    {name: field.default for name, field in fields.items()} for fields in (_FIELDS, _POOLING_FIELDS)
)
