"""/v1/responses: the handlers. Responses are stored if the server has a store (`--store FILE`)."""

import secrets
import time

from frontend.http.errors import HttpError, retry_after
from frontend.http.openai.responses import ResponsesFormat
from frontend.http.openai.responses_bodies import ResponsesBody, conversation_of, stored_items
from frontend.http.replies.answer_format import json_bytes
from frontend.http.replies.reply import Reply
from frontend.http.request import Request, Response, new_id
from frontend.http.served import Served
from frontend.http.service import Service, tenant_of
from frontend.http.shared import Shared
from frontend.http.stored import background
from frontend.http.stored.lists import page_of, read_number, read_order, read_query
from frontend.http.stored.runs import Follower, Kept, Run
from frontend.http.stored.store import RUNNING, Record, ResponseStore

_DEFAULT_ITEMS, _MAX_ITEMS = 20, 100


async def create_response(service: Service, request: Request) -> Reply | Response | Follower:
    """Answer a request of OpenAI's Responses API."""
    body = request.decode(background.decoder)
    name = service.check_model(request, body.model)
    kept = await _kept(service, request, body)
    conversation = conversation_of(body)
    history, last_item = await background.history_of(service, request, body.previous_response_id, conversation)
    is_streamed = bool(body.stream)
    seed = None
    if body.background:
        seed = secrets.randbits(63) if body.seed is None else body.seed
    prepared = await background.prepare(service, request, body, seed, history)
    if not body.background:
        answer = ResponsesFormat(service, body, name, prepared, kept=kept)
        return await service.submit(request, prepared.requests, answer)
    assert kept is not None, "a background response is stored"
    run = await background.begin(service, request, body, name, kept=kept, prepared=prepared, last_item=last_item)
    return _followed(service.shared, request, run, 0) if is_streamed else Response(json_bytes(run.snapshot))


async def get_response(served: Served, request: Request) -> Response | Follower:
    """Return a stored response, or the events of one in the background from `starting_after`."""
    query = read_query(request)
    store = _store(served)
    record = await store.get(request.target, tenant_of(request))
    if query.get("stream") != "true":
        return Response(_shown(served, record))
    if record.content.work is None or not record.content.work.is_streamed:
        text = "only a response that was created with background: true and stream: true can be streamed again"
        raise HttpError(400, text, param="stream")
    begin = read_number(query, "starting_after", -1, low=-1, high=2**53) + 1
    run = served.shared.runs.by_id.get(record.id)
    if run is None and record.status == RUNNING:
        raise HttpError(503, "the response is about to be taken up again", headers=retry_after(1000))
    if run is None:
        run = Run(background.kept_of(store, record), record.content.work, {})
        run.events = record.events
        run.leave()
    return _followed(served.shared, request, run, begin)


async def delete_response(served: Served, request: Request) -> Response:
    """Delete a stored response; one in the background is cancelled first."""
    store, tenant = _store(served), tenant_of(request)
    record = await store.get(request.target, tenant)
    if record.status == RUNNING and (run := served.shared.runs.by_id.get(record.id)) is not None:
        await background.cancel(served.shared.runs, run)
    await store.delete(record.id, tenant)
    return Response(json_bytes({"id": record.id, "object": "response", "deleted": True}))


async def cancel_response(served: Served, request: Request) -> Response:
    """Cancel a response in the background. One that has ended stays as it is."""
    store, tenant = _store(served), tenant_of(request)
    record = await store.get(request.target, tenant)
    if record.content.work is None:
        raise HttpError(400, "only a response with background: true can be cancelled")
    if record.status == RUNNING and (run := served.shared.runs.by_id.get(record.id)) is not None:
        await background.cancel(served.shared.runs, run)
        record = await store.get(record.id, tenant)
    return Response(_shown(served, record))


async def list_input_items(served: Served, request: Request) -> Response:
    """List the items that a stored response was made from, those of the responses before it among them."""
    query = read_query(request)
    store = _store(served)
    limit = read_number(query, "limit", _DEFAULT_ITEMS, low=1, high=_MAX_ITEMS)
    is_ascending = read_order(query)
    record = await store.get(request.target, tenant_of(request))
    items = await store.inputs(record, served.shared.options.max_body_bytes)
    if not is_ascending:
        items.reverse()
    return Response(json_bytes(page_of(items, query.get("after"), limit)))


def _store(served: Served) -> ResponseStore:
    if served.shared.store is None:
        raise HttpError(404, "nothing is stored here: the server was started without --store")
    return served.shared.store


async def _kept(service: Service, request: Request, body: ResponsesBody) -> Kept | None:
    """Return how this response is stored; None = it is not. Errors: HttpError 400, 507."""
    if body.background:
        background.store_of(service, "background")
        if body.store is False:
            raise HttpError(400, "background: true needs store: true", param="store")
    store, conversation = service.store, conversation_of(body)
    if conversation is not None and body.store is False:
        raise HttpError(400, "conversation needs store: true", param="store")
    if store is None or body.store is False:
        return None
    tenant, most = tenant_of(request), service.shared.most_stored(request.key)
    await store.check_room(tenant, most)
    return Kept(
        store,
        f"resp_{new_id()}",
        tenant,
        created=int(time.time()),
        previous=body.previous_response_id,
        conversation=conversation,
        most=most,
        make_items=lambda: stored_items(body, new_id),
    )


def _shown(served: Served, record: Record) -> bytes:
    """Return a stored response as it is now."""
    run = served.shared.runs.by_id.get(record.id)
    if run is not None and record.status == RUNNING:
        return json_bytes(run.snapshot)
    return record.content.response


def _followed(shared: Shared, request: Request, run: Run, begin: int) -> Follower:
    return Follower(request, run, begin, lambda: shared.note(request, Response(b""), time.monotonic()))
