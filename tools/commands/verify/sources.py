"""What `engine-core verify` reads: receipts, alone or within answers of HTTP and batch files, and captures."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from core.capture.bounds import bounded_memory
from core.capture.file import CaptureFile
from core.capture.records import MAGIC
from frontend.text.detokenizer import Detokenizer
from frontend.text.prompt_context import prompt_context
from frontend.text.tokenizer import Tokenizer
from ipc.errors import CaptureFileError, ReceiptError
from ipc.options.config import EngineConfig
from ipc.options.config_checks import BUILT_IN_EXECUTORS
from ipc.options.workers import in_one_process
from ipc.params.sampling_params import SamplingParams
from ipc.records.receipt import MAX_RECEIPT_BYTES, Finish, Header, Receipt, read_receipt
from ipc.tables.arrays import Floats
from ipc.wire.feature_messages import without_ids
from ipc.wire.messages import DECODE_ERRORS, FinishReason
from ipc.wire.pooling_messages import AddPooling
from tools.commands.replay.rerun import replay_config
from tools.commands.replay.what_if.recording import read_recording
from tools.commands.verify.verifier import Answer, Claim

#: Options of a captured engine that may decide tokens. No other is taken from a file: some open files and sockets.
_OPTIONS = (
    *(
        "model",
        "executor",
        "executor_options",
        "load_format",
        "dtype",
        "quantization",
        "device",
        "model_impl",
        "runner",
    ),
    *("enable_lora", "max_loras", "max_lora_rank", "lora_modules", "numerics", "max_model_len", "cpu_kernels"),
    *("kv_cache_dtype", "max_num_seqs", "block_size", "mmproj", "image_max_pixels", "classifier_from_token"),
)
_FINISHES: dict[Finish, FinishReason | None] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": None,
}


class Named(NamedTuple):
    """A receipt, or why it is none, with the name under which it is reported."""

    name: str
    receipt: Receipt | ReceiptError


class _Body(msgspec.Struct):
    receipts: list[msgspec.Raw] = []


class _Response(msgspec.Struct):
    body: _Body | None = None


class _Carrier(msgspec.Struct):
    """What a receipt may be in: an answer, or a line of a batch's output file. header: it is a receipt itself."""

    header: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    receipts: list[msgspec.Raw] = []
    response: _Response | None = None


def is_capture(path: str) -> bool:
    """Return whether a file begins as a capture does. Errors: OSError."""
    with Path(path).open("rb") as file:
        return MAGIC.encode() in file.read(256)


def read_receipts(path: str) -> Iterator[Named]:
    """Yield the receipts of a file: one JSON object, or one a line. Errors: OSError."""
    with Path(path).open("rb") as file:
        whole = file.read(MAX_RECEIPT_BYTES + 1)
        if len(whole) <= MAX_RECEIPT_BYTES and _is_one(whole):
            yield from _receipts_in(path, whole)
            return
        file.seek(0)
        number = 0
        while line := file.readline(MAX_RECEIPT_BYTES + 1):
            number += 1
            if line.strip():
                yield from _receipts_in(f"{path}:{number}", line)
            if len(line) > MAX_RECEIPT_BYTES:  # where the next one begins is not known
                return


def _is_one(data: bytes) -> bool:
    """Return whether this is not several JSON objects, one a line."""
    first, _, rest = data.partition(b"\n")
    return not rest.strip() or not first.rstrip().endswith(b"}")


def _receipts_in(name: str, data: bytes) -> Iterator[Named]:
    try:
        carrier = _read_carrier(data)
        if carrier.header is not msgspec.UNSET:
            yield Named(name, read_receipt(data))
            return
    except ReceiptError as error:
        yield Named(name, error)
        return
    body = None if carrier.response is None else carrier.response.body
    found = carrier.receipts or ([] if body is None else body.receipts)
    if not found:
        yield Named(name, ReceiptError("there is no receipt in it"))
    for index, raw in enumerate(found):
        own = name if len(found) == 1 else f"{name}#{index}"
        try:
            yield Named(own, read_receipt(bytes(raw)))
        except ReceiptError as error:
            yield Named(own, error)


def _read_carrier(data: bytes) -> _Carrier:
    if len(data) > MAX_RECEIPT_BYTES:
        raise ReceiptError(f"a receipt has at most {MAX_RECEIPT_BYTES} bytes, and this is longer")
    try:
        return msgspec.json.decode(data, type=_Carrier)
    except DECODE_ERRORS as error:
        raise ReceiptError(f"not a receipt: {error}") from None


def claim_of(receipt: Receipt, tokenizer: Tokenizer | None = None) -> Claim:
    """Return what a receipt with contents claims.

    tokenizer: finds the stop strings in the answers' text; None = ends by them are not compared. Errors: ReceiptError.
    """
    header, contents = receipt.header, receipt.contents
    assert isinstance(header, Header), "a receipt of vectors has no tokens"
    assert contents is not None, "the contents are withheld"
    request = header.request(contents)
    cuts = [_text_end(ids, contents.prompt_token_ids, request.params, tokenizer) for ids in contents.answers]
    ends = [
        _FINISHES[one.finish_reason] if _is_engines(one.finish_reason, request.params, tokenizer, cut) else None
        for one, cut in zip(header.answers, cuts, strict=True)
    ]
    return Claim(request, [Answer(*each) for each in zip(contents.answers, ends, cuts, strict=True)])


def _text_end(
    token_ids: Sequence[int], prompt: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
) -> int | None:
    """Return the number of tokens up to and including the one that completes a stop string; None = none does."""
    if tokenizer is None or not params.stop_strings:
        return None
    text = Detokenizer(
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        stop=params.stop_strings,
        min_tokens=params.min_tokens,
        context=prompt_context(tokenizer, prompt, params.skip_special_tokens),
    )
    text.update(token_ids)
    text.finish()
    return None if text.stop_string is None else text.num_tokens


def _is_engines(reason: Finish, params: SamplingParams, tokenizer: Tokenizer | None, cut: int | None) -> bool:
    """Return whether the engine, and not the text, is said to have ended an answer, as far as that is known."""
    return reason != "stop" or not params.stop_strings or (tokenizer is not None and cut is None)


def early_ends(header: Header, claim: Claim) -> list[int]:
    """Return the answers that are said to have reached their length, and have not, or end by a stop string."""
    params = claim.message.params
    limit = header.max_model_len - len(claim.message.prompt_token_ids) // 4  # int32
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    pairs = enumerate(zip(claim.answers, header.answers, strict=True))
    return [
        index
        for index, (answer, one) in pairs
        if one.finish_reason == "length" and (len(answer.token_ids) != limit or answer.text_ends is not None)
    ]


# Captures.


class CapturedAnswers(NamedTuple):
    """The answers of a capture: the config of its engine, and each request's claim or its vectors, by its name."""

    config: EngineConfig
    fingerprint: str
    weights: str  # "" = the capture does not say
    variant: str
    claims: dict[str, Claim]
    vectors: dict[str, tuple[AddPooling, Floats]]


def read_capture(path: str, changed: Mapping[str, object]) -> CapturedAnswers:
    """Return the answers of a capture with contents. changed: engine options in place of those of the capture.

    Errors: CaptureFileError; OtherModelError.
    """
    with bounded_memory(path):
        file = CaptureFile(path, None)
        if file.header.is_redacted:
            raise CaptureFileError(f"{path}: it is redacted, so its tokens are no model's")
        if file.begins_inside or file.num_lost:
            raise CaptureFileError(f"{path}: it lacks its beginning, or records: its answers are not whole")
        recording = read_recording(file)
    claims, pooled = dict[str, Claim](), dict[str, tuple[AddPooling, Floats]]()
    for one in recording.requests:
        name, message = f"client {one.client} request {one.message.number}", one.message
        prompt = without_ids(message.prompt_token_ids, message.features)
        message = msgspec.structs.replace(message, prompt_token_ids=prompt)
        if isinstance(message, AddPooling):
            if one.vectors is not None:
                pooled[name] = message, one.vectors
        elif any(one.tokens):
            claims[name] = Claim(message, [Answer(tokens) for tokens in one.tokens])
    return CapturedAnswers(
        _config_of(path, file, changed),
        file.header.model.fingerprint,
        file.header.model.weights,
        file.header.model.variant,
        claims,
        pooled,
    )


def _config_of(path: str, file: CaptureFile, changed: Mapping[str, object]) -> EngineConfig:
    captured = in_one_process(replay_config(file.header))
    if captured.executor not in BUILT_IN_EXECUTORS:  # a file chooses no code
        raise CaptureFileError(f"{path}: its engine ran the plug-in {captured.executor!r:.80}, which is not run here")
    options = {name: getattr(captured, name) for name in _OPTIONS}
    if file.header.model.cpu_kernels:
        options["cpu_kernels"] = file.header.model.cpu_kernels
    return EngineConfig(**{**options, **changed})
