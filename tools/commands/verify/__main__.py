"""`engine-core verify FILE ...`: compute receipts, or a capture's answers, again and say what differs first."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from core.capture.records import OtherModelError
from core.execution.executor import ModelInfo
from ipc.errors import CaptureFileError, ConfigError, OutOfMemoryError, ReceiptError
from ipc.keys.signing import read_public_key
from ipc.log_lines import counted
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.records.receipt import Header, Receipt, VectorHeader
from tools.commands.verify.given_features import (
    EMBEDS_FLAG,
    IMAGE_FLAG,
    NO_FILES,
    FeatureFiles,
    GivenFeatures,
    MissingFeaturesError,
)
from tools.commands.verify.judging import Judged, judge_tokens, judge_vectors
from tools.commands.verify.local_engine import LocalEngine, Outcome
from tools.commands.verify.sources import CapturedAnswers, Named, is_capture, read_capture, read_receipts
from tools.commands.verify.vector_verifier import PooledClaim, VectorVerifier
from tools.commands.verify.verifier import Claim, Verifier
from tools.flags.options import ArgumentParser, add_engine_options, engine_options

EXIT_SAME = 0
EXIT_DIFFERS = 3
EXIT_DAMAGED = 4  # no receipt, or one whose signature is wrong
EXIT_NOT_COMPUTED = 5  # contents are withheld, images missing, or this machine cannot compute with these kernels
_STATUS = {"verified": EXIT_SAME, "differs": EXIT_DIFFERS, "refused": EXIT_DAMAGED, "not computed": EXIT_NOT_COMPUTED}
#: Tokens of receipts that are computed together. They are in memory at the same time.
_MAX_TOGETHER = 4 << 20
_CapturedKind = tuple[Callable[[EngineConfig], LocalEngine], Callable[..., Iterator[tuple[str, Judged]]]]
#: By kind of header: the engine that computes such receipts, how they are judged, and options that it needs.
_Judge = Callable[[Any, Sequence[Receipt], GivenFeatures], list[Judged]]
_KINDS: dict[type[Header | VectorHeader], tuple[Callable[[EngineConfig], LocalEngine], _Judge, dict[str, Any]]] = {
    Header: (Verifier, judge_tokens, {}),
    VectorHeader: (VectorVerifier, judge_vectors, {"runner": "pooling"}),
}


class Asked(NamedTuple):
    """How to verify.

    options: engine options, in place of those that a receipt or a capture names. trusted: public keys; none = any key
    will do. files: of images and embeddings of the prompts.
    """

    options: Mapping[str, Any]
    trusted: Sequence[str]
    files: FeatureFiles


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one receipt, or of one request of a capture; the object that --json prints."""

    name: str
    status: str  # verified | differs | refused | not computed
    fields: list[str] = []  # of the header, that differ
    answer: int | None = None  # where tokens differ: index of the choice,
    position: int | None = None  # the first token that differs, from 0,
    expected: int | None = None  # the token computed here; None = the answer ends
    got: int | None = None  # the token of the receipt; None = the answer ends
    num_tokens: int = 0  # that were compared
    num_vectors: int = 0  # that were compared
    num_features: int = 0  # squares of images, or parts of embeddings, that the answers were computed with
    key: str = ""  # that signed it; "" = no one did
    is_trusted: bool = False  # the key is one of --key
    text: str = ""


def main(arguments: Sequence[str]) -> int:
    """Verify, and return the exit status: the largest of all receipts. Errors: those of an engine's start."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    trusted = [read_public_key(path) for path in parsed.key]
    asked = Asked(engine_options(parsed), trusted, FeatureFiles(parsed.image, parsed.prompt_embeds))
    status = EXIT_SAME
    for verdict in _verdicts(asked, parsed.files):
        status = max(status, _STATUS[verdict.status])
        if parsed.json:
            sys.stdout.write(msgspec.json.encode(verdict).decode() + "\n")
        else:
            print(describe(verdict), flush=True)
    return status


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core verify",
        usage="engine-core verify FILE ... [--key FILE ...] [--image FILE ...] [--model MODEL] [OPTION ...]",
        description="Compute the answers of receipts, or of a capture, again and say which token or field differs "
        "first. A file has a receipt, answers with receipts (of the HTTP server or of a batch), or is a capture.",
        epilog="exit status: 0 same, 1 internal error, 2 usage, 3 differs, 4 no receipt or a wrong signature, "
        "5 not computed: contents withheld, images missing, or kernels that this CPU does not run",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="FILE",
        help="a public key that receipts must be signed by, of `engine-core keys receipts`; may be given again",
    )
    parser.add_argument(
        IMAGE_FLAG,
        action="append",
        default=[],
        metavar="FILE",
        help="an image of the prompts, of which receipts and captures have digests alone; may be given again",
    )
    parser.add_argument(
        EMBEDS_FLAG,
        action="append",
        default=[],
        metavar="FILE",
        help="embeddings that are a prompt: a matrix written by numpy.save(), safetensors or torch.save(); may be "
        "given again",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each receipt, and nothing else")
    add_engine_options(parser)
    return parser


def _verdicts(asked: Asked, files: Sequence[str]) -> Iterator[Verdict]:
    named: list[Named] = []
    for path in files:
        try:
            if is_capture(path):
                yield from verify_capture(path, asked)
            else:
                named += read_receipts(path)
        except OSError as error:
            yield Verdict(path, "refused", text=f"it cannot be read: {error.strerror}")
        except (CaptureFileError, OtherModelError) as error:
            yield Verdict(path, "refused", text=str(error))
    yield from verify_receipts(named, *asked)


def verify_receipts(
    named: Iterable[Named],
    options: Mapping[str, Any],
    trusted: Sequence[str] = (),
    files: FeatureFiles = NO_FILES,
) -> Iterator[Verdict]:
    """Yield a verdict for each receipt; those for one engine are computed together.

    options, trusted, files: see Asked. Errors: ConfigError for a file that the model does not read.
    """
    good: list[tuple[str, Receipt]] = []
    for name, receipt in named:
        try:
            if isinstance(receipt, ReceiptError):
                raise receipt
            receipt.check_signature(trusted)
        except ReceiptError as error:
            yield Verdict(name, "refused", text=str(error))
        else:
            good.append((name, receipt))
    for _, group in groupby(sorted(good, key=_engine_of), _engine_of):
        yield from _verify_group(list(group), Asked(options, trusted, files))


def _engine_of(one: tuple[str, Receipt]) -> tuple[str, str, str, int]:
    header = one[1].header
    return type(header).__name__, header.dtype, header.cpu_kernels, header.max_model_len


def _verify_group(group: Sequence[tuple[str, Receipt]], asked: Asked) -> Iterator[Verdict]:
    header = group[0][1].header
    own = {"dtype": header.dtype, "cpu_kernels": header.cpu_kernels or "auto", "max_model_len": header.max_model_len}
    start, judge, more = _KINDS[type(header)]
    try:
        engine = start(config_from_options(**{**own, **more, **asked.options}))
    except (ConfigError, OutOfMemoryError) as error:
        text = f"no engine here can compute it: {error}"
        yield from (Verdict(name, "not computed", text=text) for name, _ in group)
        return
    try:
        contents = [receipt.contents for _, receipt in group if receipt.contents is not None]
        used = {bytes.fromhex(feature.digest) for one in contents for feature in one.features}
        given = GivenFeatures(engine, asked.files if used else NO_FILES, used)
        while group:
            count = _num_together(group)
            names, receipts = zip(*group[:count], strict=True)
            for name, receipt, judged in zip(names, receipts, judge(engine, receipts, given), strict=True):
                signed = {"key": receipt.public_key, "is_trusted": receipt.public_key in asked.trusted}
                yield msgspec.structs.replace(_verdict(name, judged), **signed)
            group = group[count:]
    finally:
        engine.close()


def _num_together(group: Sequence[tuple[str, Receipt]]) -> int:
    """Return how many of the next receipts are computed together, at least 1."""
    num_tokens = 0
    for index, (_, receipt) in enumerate(group):
        num_tokens += receipt.header.num_computed
        if index and num_tokens > _MAX_TOGETHER:
            return index
    return len(group)


def _verdict(name: str, judged: Judged) -> Verdict:
    fields, outcome = list(judged.fields), judged.outcome
    counts = {name: getattr(judged, name) for name in ("num_tokens", "num_vectors", "num_features")}
    if outcome.has_no_adapter:
        fields.append("adapter")
    if outcome.difference is not None:
        return Verdict(name, "differs", fields, *outcome.difference, text=judged.text, **counts)
    if outcome.failure or fields:
        text = "; ".join(filter(None, (judged.text, outcome.failure)))
        return Verdict(name, "differs", fields, text=text, **counts)
    if judged.lacks:
        return Verdict(name, "not computed", text=judged.lacks)
    return Verdict(name, "verified", **counts)


def verify_capture(path: str, asked: Asked) -> Iterator[Verdict]:
    """Yield a verdict for each request of a capture. Errors: CaptureFileError, OtherModelError; ConfigError for a file
    that the model does not read.
    """
    captured = read_capture(path, asked.options)
    kinds: list[_CapturedKind] = []
    if captured.claims:
        kinds.append((Verifier, _captured_tokens))
    if captured.vectors:
        kinds.append((VectorVerifier, _captured_vectors))
    for start, judge in kinds:
        engine = start(captured.config)
        try:
            info = engine.info
            if info.fingerprint != captured.fingerprint:
                yield _of_another_model(path, captured, info)
                return
            for name, judged in judge(engine, captured, asked.files):
                yield _verdict(f"{path}: {name}", judged)
        finally:
            engine.close()


def _of_another_model(path: str, captured: CapturedAnswers, info: ModelInfo) -> Verdict:
    parts = {"weights": (captured.weights, info.weights), "profile": (captured.variant, info.variant)}
    differing = [name for name, (theirs, ours) in parts.items() if theirs and theirs != ours]
    text = f"the capture's fingerprint is {captured.fingerprint:.16}, and this engine's {info.fingerprint:.16}"
    return Verdict(path, "differs", differing or ["fingerprint"], text=text)


def _captured_tokens(engine: Verifier, captured: CapturedAnswers, files: FeatureFiles) -> Iterator[tuple[str, Judged]]:
    used = {use.digest for claim in captured.claims.values() for use in claim.message.features}
    given = GivenFeatures(engine, files if used else NO_FILES, used)
    whole = dict[str, Claim]()
    for name, claim in captured.claims.items():
        try:
            whole[name] = claim._replace(features=given.of(claim.message.features))
        except MissingFeaturesError as error:
            yield name, Judged(lacks=str(error))
    for (name, claim), outcome in zip(whole.items(), engine.verify(list(whole.values())), strict=True):
        count = sum(len(one.token_ids) for one in claim.answers)
        yield name, Judged(outcome=outcome, num_tokens=count, num_features=len(claim.features))


def _captured_vectors(
    engine: VectorVerifier, captured: CapturedAnswers, files: FeatureFiles
) -> Iterator[tuple[str, Judged]]:
    used = {use.digest for message, _ in captured.vectors.values() for use in message.features}
    given = GivenFeatures(engine, files if used else NO_FILES, used)
    whole = dict[str, PooledClaim]()
    for name, (message, _) in captured.vectors.items():
        try:
            whole[name] = PooledClaim(message, given.of(message.features))
        except MissingFeaturesError as error:
            yield name, Judged(lacks=str(error))
    for (name, claim), ours in zip(whole.items(), engine.compute(list(whole.values())), strict=True):
        theirs, count = captured.vectors[name][1], len(claim.features)
        if isinstance(ours, Outcome):
            yield name, Judged(outcome=ours)
        elif ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes():
            yield name, Judged(num_vectors=len(ours), num_features=count)
        else:
            yield name, Judged(["vectors"])


def describe(verdict: Verdict) -> str:
    """Return a verdict as a line of text."""
    parts = []
    if verdict.position is not None:
        here, there = (("the end" if one is None else f"token {one}") for one in (verdict.expected, verdict.got))
        parts.append(f"answer {verdict.answer}, position {verdict.position}: expected {here}, got {there}")
    if verdict.fields:
        parts.append(f"fields: {', '.join(verdict.fields)}")
    if verdict.text:
        parts.append(verdict.text)
    if verdict.status == "verified":
        counts = (
            (verdict.num_tokens, "token"),
            (verdict.num_vectors, "vector"),
            (verdict.num_features, "feature"),
        )
        parts += [counted(*one) for one in counts if one[0]]
        key = f"signed by {verdict.key:.16}{'' if verdict.is_trusted else ' (not compared with --key)'}"
        return f"{verdict.name}: verified: {', '.join([*parts, key if verdict.key else 'not signed'])}"
    return f"{verdict.name}: {verdict.status}: {'; '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
