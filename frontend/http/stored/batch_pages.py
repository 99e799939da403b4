"""/v1/batches: the handlers."""

import time
from typing import Any

import msgspec

from frontend.http.errors import HttpError, retry_after
from frontend.http.replies.answer_format import json_bytes
from frontend.http.request import Request, Response, new_id
from frontend.http.served import Served
from frontend.http.service import tenant_of
from frontend.http.stored.batch_runs import ENDPOINTS, Batches
from frontend.http.stored.batch_store import VALIDATING, Batch, Plan
from frontend.http.stored.files import HIDDEN, NEVER, File, FileInfo
from frontend.http.stored.lists import page_of, read_number, read_query

_WINDOW, _WINDOW_S = "24h", 86_400
_MAX_UNFINISHED = 100  # batches of one key
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_MAX_METADATA, _MAX_NAME, _MAX_VALUE = 16, 64, 512
_MAX_BODY = 64 << 10
_MIN_KEPT_S, _MAX_KEPT_S = 3600, 2_592_000


class ExpiresAfter(msgspec.Struct):
    """When files of answers are deleted. seconds: after `anchor`, which is created_at."""

    anchor: str
    seconds: int


class BatchBody(msgspec.Struct, kw_only=True):
    """The body of /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


_decoder = msgspec.json.Decoder(BatchBody)


async def create_batch(served: Served, request: Request) -> Response:
    """Begin a batch: the requests of an uploaded file, answered into another one."""
    batches, tenant = batches_of(served), tenant_of(request)
    if len(request.body) > _MAX_BODY:
        raise HttpError(400, f"the body has {len(request.body)} bytes; at most {_MAX_BODY} are allowed")
    body = request.decode(_decoder)
    _check(body)
    if sum(run.batch.tenant == tenant for run in batches.runs.values()) >= _MAX_UNFINISHED:
        text = f"the key has {_MAX_UNFINISHED} batches that have not ended, its limit"
        raise HttpError(429, text, headers=retry_after(60_000))
    file = await _input(batches, body.input_file_id, tenant)
    most = served.shared.most_stored(request.key)
    await batches.files.database.check_room(tenant, most)
    now, kept = int(time.time()), body.output_expires_after
    ends = NEVER if kept is None else now + kept.seconds
    batch_id, stem = f"batch_{new_id()}", file.info.name.removesuffix(".jsonl")
    outputs = [
        File(f"file-{new_id()}", tenant, now, ends, HIDDEN, FileInfo(f"{stem}_{kind}.jsonl", "batch_output"))
        for kind in ("output", "error")
    ]
    ids = [one.id for one in outputs]
    plan = Plan(body.endpoint, ids[0], ids[1], _WINDOW, now + _WINDOW_S, body.metadata)
    batch = Batch(batch_id, tenant, now, file.id, VALIDATING, plan)
    await batches.store.put(batch, outputs, most)
    batches.begin(batch)
    return Response(json_bytes(batch.shown()))


async def list_batches(served: Served, request: Request) -> Response:
    """List the caller's batches, the newest first."""
    batches, query = batches_of(served), read_query(request)
    limit = read_number(query, "limit", _DEFAULT_LIMIT, low=1, high=_MAX_LIMIT)
    found = [_present(batches, batch).shown() for batch in await batches.store.all_of(tenant_of(request))]
    return Response(json_bytes(page_of(found, query.get("after"), limit)))


async def get_batch(served: Served, request: Request) -> Response:
    """Describe a batch."""
    batches = batches_of(served)
    batch = await batches.store.get(request.target, tenant_of(request))
    return Response(json_bytes(_present(batches, batch).shown()))


async def cancel_batch(served: Served, request: Request) -> Response:
    """End a batch. Its answers so far stay in its files; one that has ended stays as it is."""
    batches = batches_of(served)
    batch = await batches.store.get(request.target, tenant_of(request))
    return Response(json_bytes((await batches.cancel(batch)).shown()))


def batches_of(served: Served) -> Batches:
    """Return the batches of a server. Errors: HttpError 404 if it stores nothing."""
    if served.shared.batches is None:
        raise HttpError(404, "nothing is stored here: the server was started without --store")
    return served.shared.batches


def _present(batches: Batches, batch: Batch) -> Batch:
    """Return the state of a batch now."""
    run = batches.runs.get(batch.id)
    return batch if run is None else run.batch


async def _input(batches: Batches, file_id: str, tenant: str) -> File:
    try:
        file = await batches.files.get(file_id, tenant)
    except HttpError as error:
        if error.status != 404:
            raise
        raise HttpError(400, str(error), param="input_file_id") from None
    if file.info.purpose != "batch":
        text = f"the file's purpose is {file.info.purpose!r}; a batch reads one with the purpose 'batch'"
        raise HttpError(400, text, param="input_file_id")
    return file


def _check(body: BatchBody) -> None:
    """Check a body. Errors: HttpError 400."""
    if body.endpoint not in ENDPOINTS:
        text = f"endpoint must be one of {', '.join(ENDPOINTS)}; got {body.endpoint!r:.40}"
        raise HttpError(400, text, param="endpoint")
    if body.completion_window != _WINDOW:
        text = f"completion_window must be {_WINDOW}; got {body.completion_window!r:.40}"
        raise HttpError(400, text, param="completion_window")
    check_metadata(body.metadata)
    kept = body.output_expires_after
    if kept is not None and (kept.anchor != "created_at" or not _MIN_KEPT_S <= kept.seconds <= _MAX_KEPT_S):
        text = f"output_expires_after must be from created_at, and {_MIN_KEPT_S} to {_MAX_KEPT_S} seconds"
        raise HttpError(400, text, param="output_expires_after")


def check_metadata(metadata: dict[str, Any] | None) -> None:
    """Check the notes of a caller. Errors: HttpError 400."""
    given = metadata or {}
    if len(given) > _MAX_METADATA:
        raise HttpError(400, f"metadata has {len(given)} fields; at most {_MAX_METADATA} are allowed", param="metadata")
    for name, value in given.items():
        if len(name) > _MAX_NAME or not isinstance(value, str) or len(value) > _MAX_VALUE:
            text = f"metadata: names have up to {_MAX_NAME} characters, and values are texts of up to {_MAX_VALUE}"
            raise HttpError(400, text, param="metadata")
