"""`engine-core verify FILE ...`: compute receipts, or a capture's answers, again and say what differs first."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from core.capture.records import OtherModelError
from ipc.errors import CaptureFileError, ConfigError, OutOfMemoryError, ReceiptError
from ipc.keys.signing import read_public_key
from ipc.log_lines import counted
from ipc.options.given_options import config_from_options
from ipc.records.receipt import Contents, Header, Receipt
from tools.commands.verify.sources import Named, claim_of, early_ends, is_capture, read_capture, read_receipts
from tools.commands.verify.verifier import Outcome, Verifier
from tools.flags.options import ArgumentParser, add_engine_options, engine_options

EXIT_SAME = 0
EXIT_DIFFERS = 3
EXIT_DAMAGED = 4  # no receipt, or one whose signature is wrong
EXIT_NOT_COMPUTED = 5  # the contents are withheld, or this machine cannot compute with these kernels
_STATUS = {"verified": EXIT_SAME, "differs": EXIT_DIFFERS, "refused": EXIT_DAMAGED, "not computed": EXIT_NOT_COMPUTED}
#: Tokens of receipts that are computed together. They are in memory at the same time.
_MAX_TOGETHER = 4 << 20


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
    key: str = ""  # that signed it; "" = no one did
    is_trusted: bool = False  # the key is one of --key
    text: str = ""


def main(arguments: Sequence[str]) -> int:
    """Verify, and return the exit status: the largest of all receipts. Errors: those of an engine's start."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    options = engine_options(parsed)
    trusted = [read_public_key(path) for path in parsed.key]
    status = EXIT_SAME
    for verdict in _verdicts(parsed.files, options, trusted):
        status = max(status, _STATUS[verdict.status])
        if parsed.json:
            sys.stdout.write(msgspec.json.encode(verdict).decode() + "\n")
        else:
            print(describe(verdict), flush=True)
    return status


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core verify",
        usage="engine-core verify FILE ... [--key FILE ...] [--model MODEL] [OPTION ...]",
        description="Compute the answers of receipts, or of a capture, again and say which token or field differs "
        "first. A file has a receipt, answers with receipts (of the HTTP server or of a batch), or is a capture.",
        epilog="exit status: 0 same, 1 internal error, 2 usage, 3 differs, 4 no receipt or a wrong signature, "
        "5 not computed: contents withheld, or kernels that this CPU does not run",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="FILE",
        help="a public key that receipts must be signed by, of `engine-core keys receipts`; may be given again",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each receipt, and nothing else")
    add_engine_options(parser)
    return parser


def _verdicts(files: Sequence[str], options: Mapping[str, Any], trusted: Sequence[str]) -> Iterator[Verdict]:
    named: list[Named] = []
    for path in files:
        try:
            if is_capture(path):
                yield from verify_capture(path, options)
            else:
                named += read_receipts(path)
        except OSError as error:
            yield Verdict(path, "refused", text=f"it cannot be read: {error.strerror}")
        except (CaptureFileError, OtherModelError) as error:
            yield Verdict(path, "refused", text=str(error))
    yield from verify_receipts(named, options, trusted)


def verify_receipts(
    named: Iterable[Named], options: Mapping[str, Any], trusted: Sequence[str] = ()
) -> Iterator[Verdict]:
    """Yield a verdict for each receipt; those for one engine are computed together.

    options: engine options, in place of those that a receipt names. trusted: public keys; none = any key will do.
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
        yield from _verify_group(list(group), options, trusted)


def _engine_of(one: tuple[str, Receipt]) -> tuple[str, str, int]:
    header = one[1].header
    return header.dtype, header.cpu_kernels, header.max_model_len


def _verify_group(
    group: Sequence[tuple[str, Receipt]], options: Mapping[str, Any], trusted: Sequence[str]
) -> Iterator[Verdict]:
    header = group[0][1].header
    own = {"dtype": header.dtype, "cpu_kernels": header.cpu_kernels or "auto", "max_model_len": header.max_model_len}
    try:
        verifier = Verifier(config_from_options(**{**own, **options}))
    except (ConfigError, OutOfMemoryError) as error:
        text = f"no engine here can compute it: {error}"
        yield from (Verdict(name, "not computed", text=text) for name, _ in group)
        return
    try:
        while group:
            count = _num_together(group)
            yield from _verify_some(verifier, group[:count], trusted)
            group = group[count:]
    finally:
        verifier.close()


def _num_together(group: Sequence[tuple[str, Receipt]]) -> int:
    """Return how many of the next receipts are computed together, at least 1."""
    num_tokens = 0
    for index, (_, receipt) in enumerate(group):
        header = receipt.header
        num_tokens += sum(header.num_prompt_tokens + one.num_tokens for one in header.answers)
        if index and num_tokens > _MAX_TOGETHER:
            return index
    return len(group)


def _verify_some(verifier: Verifier, group: Sequence[tuple[str, Receipt]], trusted: Sequence[str]) -> Iterator[Verdict]:
    fields, texts = dict[str, list[str]](), dict[str, str]()
    claims = {}
    for index, (_, receipt) in enumerate(group):
        place = str(index)
        differing = differing_fields(receipt.header, verifier)
        fields[place] = list(differing)
        texts[place] = "; ".join(differing.values())
        if receipt.contents is None or {"weights", "profile", "fingerprint"} & set(differing):
            continue
        fields[place] += receipt.broken_digests()
        try:
            claims[place] = claim_of(receipt, None if "tokenizer" in differing else verifier.tokenizer)
            if early_ends(receipt, claims[place]):
                fields[place].append("finish_reason")
        except ReceiptError as error:
            texts[place] = str(error)
            fields[place].append("parameters")
    outcomes = dict(zip(claims, verifier.verify(list(claims.values())), strict=True))
    for index, (name, receipt) in enumerate(group):
        place = str(index)
        outcome = outcomes.get(place, Outcome())
        verdict = _verdict(name, fields[place], outcome, texts[place], receipt.contents)
        num_tokens = sum(one.num_tokens for one in receipt.header.answers) if place in claims else 0
        signed = {"key": receipt.public_key, "is_trusted": receipt.public_key in trusted}
        yield msgspec.structs.replace(verdict, num_tokens=num_tokens, **signed)


def _verdict(name: str, fields: list[str], outcome: Outcome, text: str, contents: Contents | None) -> Verdict:
    if outcome.has_no_adapter:
        fields = [*fields, "adapter"]
    if outcome.difference is not None:
        return Verdict(name, "differs", fields, *outcome.difference, text=text)
    if outcome.failure or fields:
        return Verdict(name, "differs", fields, text="; ".join(filter(None, (text, outcome.failure))))
    if contents is None:
        return Verdict(name, "not computed", text="the contents are withheld: only header and signature were looked at")
    return Verdict(name, "verified")


def differing_fields(header: Header, verifier: Verifier) -> dict[str, str]:
    """Return what a receipt's header and an engine do not agree on, by name, each with a text."""
    info, found = verifier.info, dict[str, str]()
    pairs = {
        "weights": (header.weights, info.weights),
        "profile": (f"{header.dtype} {header.variant}", f"{info.dtype} {info.variant}"),
        "max_model_len": (str(header.max_model_len), str(verifier.config.max_model_len)),
        "tokenizer": (header.tokenizer, verifier.tokenizer_hash),
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


def verify_capture(path: str, options: Mapping[str, Any]) -> Iterator[Verdict]:
    """Yield a verdict for each request of a capture. Errors: CaptureFileError, OtherModelError."""
    captured = read_capture(path, options)
    verifier = Verifier(captured.config)
    try:
        info = verifier.info
        if info.fingerprint != captured.fingerprint:
            parts = {"weights": (captured.weights, info.weights), "profile": (captured.variant, info.variant)}
            differing = [name for name, (theirs, ours) in parts.items() if theirs and theirs != ours]
            text = f"the capture's fingerprint is {captured.fingerprint:.16}, and this engine's {info.fingerprint:.16}"
            yield Verdict(path, "differs", differing or ["fingerprint"], text=text)
            return
        outcomes = verifier.verify(list(captured.claims.values()))
        for (name, claim), outcome in zip(captured.claims.items(), outcomes, strict=True):
            verdict = _verdict(f"{path}: {name}", [], outcome, "", Contents("", [], {}, [[]]))
            count = sum(len(one.token_ids) for one in claim.answers)
            yield msgspec.structs.replace(verdict, num_tokens=count)
        for name, why in captured.skipped.items():
            yield Verdict(f"{path}: {name}", "not computed", text=why)
    finally:
        verifier.close()


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
        key = f"signed by {verdict.key:.16}{'' if verdict.is_trusted else ' (not compared with --key)'}"
        parts.append(f"{counted(verdict.num_tokens, 'token')}, {key if verdict.key else 'not signed'}")
    return f"{verdict.name}: {verdict.status}: {'; '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
