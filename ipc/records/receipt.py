"""Receipt: an answer with all that decides its tokens, so that others can compute it again (docs/receipts.md).

A receipt has two parts. The header has digests of everything and is what a signature covers. The contents have the
tokens and the parameters, with the salt of the digests. Who holds a receipt may give it on without the contents: the
signature stays good, and says nothing of the conversation. Receipts come from strangers: they are data of bounded size.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from ipc.errors import InvalidRequestError, ReceiptError
from ipc.keys.signing import SigningKey, check_signature
from ipc.params.sampling_params import MAX_CHOICES, SamplingParams
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import DECODE_ERRORS, AddRequest, Welcome

FORM = "engine-core receipt 1"
#: Largest receipt, bytes of JSON: a prompt and answers of a million tokens together.
MAX_RECEIPT_BYTES = 8 << 20
_SALT_BYTES = 32

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

#: Fields of SamplingParams that decide no token: what is reported, how text is made of tokens, and what is in the
#: header. bad_words are text, and the engine reads their token ids. skip_special_tokens decides where stop strings are.
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


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a receipt says without its contents; the signature covers it. Digests: see digest_of()."""

    form: Literal["engine-core receipt 1"]
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
    seed: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # uint64, hexadecimal
    num_prompt_tokens: _Count
    prompt: _Digest
    parameters: _Digest
    answers: _AnswerDigests


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens and the parameters, and the salt of their digests."""

    salt: _Digest
    prompt_token_ids: _TokenIds
    parameters: dict[_Name, Any]  # fields of SamplingParams that are not at their defaults
    answers: Annotated[list[_TokenIds], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A receipt. public_key, signature: hexadecimal; "" = it is not signed. contents: None = they are withheld."""

    header: Header
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
        header, contents = self.header, self.contents
        if contents is None:
            return []
        salt = bytes.fromhex(contents.salt)
        broken = []
        if header.num_prompt_tokens != len(contents.prompt_token_ids) or header.prompt != digest_of(
            salt, "prompt", ids_bytes(contents.prompt_token_ids)
        ):
            broken.append("prompt")
        if header.parameters != digest_of(salt, "parameters", _canonical(contents.parameters)):
            broken.append("parameters")
        if [_answer_digest(salt, *one) for one in enumerate(contents.answers)] != [
            (one.digest, one.num_tokens) for one in header.answers
        ]:
            broken.append("answers")
        return broken

    def request(self) -> AddRequest:
        """Return the request that the answers are said to follow from. Errors: ReceiptError."""
        assert self.contents is not None, "the contents are withheld"
        params = _read_parameters(self.contents.parameters)
        if not len(self.contents.answers) == len(self.header.answers) == params.n:
            raise ReceiptError(f"the receipt has {len(self.contents.answers)} answers, and n={params.n}")
        adapter = AdapterId(self.header.adapter) if self.header.adapter else None
        prompt = ids_bytes(self.contents.prompt_token_ids)
        return AddRequest(0, prompt, params, int(self.header.seed, 16), adapter=adapter)


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
    check_provable(welcome, request)
    if len(answers) != request.params.n or any(one.finish_reason not in _FINISHES for one in answers):
        raise InvalidRequestError(f"{_NO_RECEIPT}: it has not ended, or is a part of an answer (output_kind DELTA)")
    arithmetic = welcome.arithmetic
    assert arithmetic is not None
    salt = secrets.token_bytes(_SALT_BYTES)
    prompt = np.frombuffer(request.prompt_token_ids, "<i4").tolist()
    contents = Contents(
        salt.hex(), prompt, _deciding_parameters(request.params), [list(one.token_ids) for one in answers]
    )
    digests = [_answer_digest(salt, *one) for one in enumerate(contents.answers)]
    header = Header(
        form="engine-core receipt 1",
        created=int(time.time()) if created is None else created,
        engine_version=welcome.server_version,
        model=welcome.model_name[:1024],
        weights=arithmetic.weights,
        tokenizer=welcome.tokenizer_hash,
        fingerprint=welcome.model_fingerprint,
        numerics="L2",
        dtype=arithmetic.dtype,
        variant=arithmetic.variant,
        cpu_kernels=arithmetic.cpu_kernels,
        max_model_len=welcome.limits.max_model_len,
        adapter="" if request.adapter is None else request.adapter.digest,
        seed=f"{request.seed:016x}",
        num_prompt_tokens=len(prompt),
        prompt=digest_of(salt, "prompt", request.prompt_token_ids),
        parameters=digest_of(salt, "parameters", _canonical(contents.parameters)),
        answers=[
            AnswerDigest(*digest, one.finish_reason)  # type: ignore[arg-type]
            for digest, one in zip(digests, answers, strict=True)
        ],
    )
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


def check_provable(welcome: Welcome, request: AddRequest) -> None:
    """Check that answers to a request can have receipts. Errors: InvalidRequestError that says why not."""
    why = ""
    if welcome.numerics != "L2":
        why = f"its engine has numerics level {welcome.numerics}, and receipts need L2: others could get other tokens"
    elif welcome.arithmetic is None:
        why = "its engine does not say which weights and kernels it computes with"
    elif request.features:
        why = "its prompt has images or embeddings, of which a receipt would have the digests alone"
    if why:
        raise InvalidRequestError(f"{_NO_RECEIPT}: {why}")


def _deciding_parameters(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that decide tokens and are not at their defaults, as JSON has them."""
    return {
        name: msgspec.to_builtins(value, str_keys=True)
        for name, default in _DEFAULTS.items()
        if (value := getattr(params, name)) != default
        and value != []
        and (name != "skip_special_tokens" or params.stop_strings)
    }


def _read_parameters(given: dict[str, Any]) -> SamplingParams:
    """Errors: ReceiptError."""
    try:
        values = {}
        for name, value in given.items():
            if name not in _DEFAULTS:
                raise ReceiptError(f"parameters has {name!r:.80}, which is no parameter that decides tokens")
            values[name] = msgspec.convert(value, _TYPES[name], str_keys=True)
        return SamplingParams(**values)
    except (msgspec.ValidationError, InvalidRequestError) as error:
        raise ReceiptError(f"parameters of the receipt: {error}") from None


def _signed_bytes(header: Header) -> bytes:
    return FORM.encode() + b"\n" + _canonical(header)


def _canonical(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


_decoder = msgspec.json.Decoder(Receipt)
_NO_RECEIPT = "no receipt can be made of this answer"
_FINISHES = ("stop", "length", "abort")
_FIELDS = {field.name: field for field in msgspec.structs.fields(SamplingParams) if field.name not in _UNDECIDING}
_DEFAULTS = {name: field.default for name, field in _FIELDS.items()}
_TYPES = {name: field.type for name, field in _FIELDS.items()}
