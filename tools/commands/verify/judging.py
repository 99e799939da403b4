"""judge_tokens, judge_vectors: receipts are compared with what an engine here computes."""

from collections.abc import Sequence
from typing import NamedTuple

from ipc.errors import ReceiptError
from ipc.records.receipt import Header, Receipt, VectorHeader
from ipc.wire.pooling_messages import AddPooling
from tools.commands.verify.given_features import GivenFeatures, MissingFeaturesError
from tools.commands.verify.local_engine import LocalEngine, Outcome
from tools.commands.verify.sources import claim_of, early_ends
from tools.commands.verify.vector_verifier import PooledClaim, VectorVerifier
from tools.commands.verify.verifier import Claim, Verifier

_WITHHELD = "the contents are withheld: only header and signature were looked at"


class Judged(NamedTuple):
    """What was found of a receipt, or of a request of a capture.

    fields: of the header, that differ. lacks: why it could not be computed; "" = it was, or differs anyway. num_tokens,
    num_vectors: that were compared. num_features: that the answers were computed with.
    """

    fields: Sequence[str] = ()
    text: str = ""
    outcome: Outcome = Outcome()
    lacks: str = ""
    num_tokens: int = 0
    num_vectors: int = 0
    num_features: int = 0


def judge_tokens(verifier: Verifier, receipts: Sequence[Receipt], given: GivenFeatures) -> list[Judged]:
    """Compute the answers of receipts of tokens together; return what was found of each."""
    found, claims = list[Judged](), dict[int, Claim]()
    for index, receipt in enumerate(receipts):
        differing = differing_fields(receipt, verifier)
        judged = _looked_at(receipt, differing)
        if _is_computable(receipt, differing):
            tokenizer = None if "tokenizer" in differing else verifier.tokenizer
            try:
                claim = claim_of(receipt, tokenizer)
                judged, claims[index] = _with_claim(judged, receipt, claim, given)
            except ReceiptError as error:
                judged = judged._replace(fields=[*judged.fields, "parameters"], text=str(error))
            except MissingFeaturesError as error:
                judged = _without(judged, error)
        found.append(judged)
    outcomes = verifier.verify(list(claims.values()))
    for index, outcome in zip(claims, outcomes, strict=True):
        found[index] = found[index]._replace(outcome=outcome)
    return found


def _with_claim(judged: Judged, receipt: Receipt, claim: Claim, given: GivenFeatures) -> tuple[Judged, Claim]:
    """Errors: MissingFeaturesError."""
    claim = claim._replace(features=given.of(claim.message.features))
    assert isinstance(receipt.header, Header), type(receipt.header)
    late = ["finish_reason"] if early_ends(receipt.header, claim) else []
    count = sum(one.num_tokens for one in receipt.header.answers)
    judged = judged._replace(num_tokens=count, num_features=len(claim.features))
    return judged._replace(fields=[*judged.fields, *late]), claim


def _without(judged: Judged, error: MissingFeaturesError) -> Judged:
    """Return what is found of a receipt whose features were not given."""
    if error.is_other:
        return judged._replace(fields=[*judged.fields, "features"], text=str(error))
    return judged._replace(lacks=str(error))


def judge_vectors(verifier: VectorVerifier, receipts: Sequence[Receipt], given: GivenFeatures) -> list[Judged]:
    """Compute the vectors of receipts together; return what was found of each."""
    found, claims = list[Judged](), dict[int, PooledClaim]()
    for index, receipt in enumerate(receipts):
        differing = differing_fields(receipt, verifier)
        judged = _looked_at(receipt, differing)
        if _is_computable(receipt, differing):
            try:
                message = vectors_asked(receipt)
                claims[index] = PooledClaim(message, given.of(message.features))
                judged = judged._replace(num_features=len(message.features))
            except ReceiptError as error:
                judged = judged._replace(fields=[*judged.fields, "parameters"], text=str(error))
            except MissingFeaturesError as error:
                judged = _without(judged, error)
        found.append(judged)
    for index, vectors in zip(claims, verifier.compute(list(claims.values())), strict=True):
        receipt, judged = receipts[index], found[index]
        header, contents = receipt.header, receipt.contents
        assert isinstance(header, VectorHeader), type(header)
        if isinstance(vectors, Outcome):
            found[index] = judged._replace(outcome=vectors)
        elif contents is not None and header.has_vectors(contents, vectors):
            found[index] = judged._replace(num_vectors=header.num_vectors)
        else:
            found[index] = judged._replace(fields=[*judged.fields, "vectors"])
    return found


def vectors_asked(receipt: Receipt) -> AddPooling:
    """Return the request of a receipt of vectors. Errors: ReceiptError."""
    request = receipt.request()
    assert isinstance(request, AddPooling), type(request)
    return request


def _looked_at(receipt: Receipt, differing: dict[str, str]) -> Judged:
    """Return what is known of a receipt before anything is computed."""
    text = "; ".join(differing.values())
    if receipt.contents is None:
        return Judged(list(differing), text, lacks=_WITHHELD)
    return Judged([*differing, *(receipt.broken_digests() if _is_computable(receipt, differing) else [])], text)


def _is_computable(receipt: Receipt, differing: dict[str, str]) -> bool:
    return receipt.contents is not None and not {"weights", "profile", "fingerprint"} & set(differing)


def differing_fields(receipt: Receipt, engine: LocalEngine) -> dict[str, str]:
    """Return what a receipt's header and an engine do not agree on, by name, each with a text."""
    header, info, found = receipt.header, engine.info, dict[str, str]()
    pairs = {
        "weights": (header.weights, info.weights),
        "profile": (f"{header.dtype} {header.variant}", f"{info.dtype} {info.variant}"),
        "max_model_len": (str(header.max_model_len), str(engine.config.max_model_len)),
        "tokenizer": (header.tokenizer, engine.tokenizer_hash),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            found[name] = f"{name}: the receipt's is {theirs!r:.200}, and this engine's {ours!r:.200}"
    if info.numerics != "L2":
        found["profile"] = f"profile: this engine has numerics level {info.numerics}, and receipts are of L2"
    elif header.fingerprint != info.fingerprint and not {"weights", "profile"} & set(found):
        found["fingerprint"] = f"fingerprint: the receipt's is {header.fingerprint:.16}, and this engine's is "
        found["fingerprint"] += f"{info.fingerprint:.16}, with the same weights and kernels"
    return found
