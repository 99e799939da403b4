"""Responses that are computed in the background: begun by a request, and taken up again by the next server.

If a server is killed, the response is computed again from its beginning, with the same prompt, parameters and seed. An
engine of level L2 gives the same tokens, so its events have the same numbers and bytes.
"""

import asyncio
import logging

import msgspec

from frontend.http.bodies import Json
from frontend.http.callers.keys import Key
from frontend.http.chat_request import PreparedChat, prepare_chat
from frontend.http.errors import HttpError, http_error
from frontend.http.openai.responses import ResponsesFormat
from frontend.http.openai.responses_bodies import ResponsesBody, chat_of
from frontend.http.replies.reply import Reply
from frontend.http.request import Request
from frontend.http.service import Service, tenant_of
from frontend.http.stored.runs import Kept, Run
from frontend.http.stored.store import Record, ResponseStore, Work
from frontend.http.wire.exchange import Exchange, Message, NoWire

decoder = msgspec.json.Decoder(ResponsesBody)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0  # before a response that was refused is begun again
_log = logging.getLogger("engine_core.http")


async def begin(
    service: Service, request: Request, body: ResponsesBody, name: str, *, kept: Kept, prepared: PreparedChat
) -> Run:
    """Store a response that has not begun, and begin it. Errors: HttpError; those of Service.submit()."""
    assert service.store is not None, "nothing is stored here"
    assert body.seed is not None, "the draws could not be repeated"
    prompt = prepared.requests[0].prompt.token_ids
    is_streamed = msgspec.json.decode(request.body, type=_Streamed).stream is True
    work = Work(request.body, name, body.seed, prompt, service.fingerprint, is_streamed)
    run = kept.run = Run(kept, work, {})
    answer = ResponsesFormat(service, body, name, prepared, kept=kept)
    await kept.put(answer.begun(), work)
    inner = _unheard(request.key, request.id)
    inner.lease, request.lease = request.lease, None
    try:
        reply = await service.submit(inner, prepared.requests, answer)
    except BaseException:
        await service.store.delete(kept.id, tenant_of(request))
        raise
    _take(service, run, reply, answer)
    return run


async def resume(service: Service) -> None:
    """Take up the responses that an earlier server has left, as far as the store can be read."""
    if service.store is None:
        return
    try:
        left = await service.store.unfinished()
    except HttpError as error:
        _log.error("no response is taken up again: %s", error)
        return
    for record in left:
        assert record.content.work is not None, f"{record.id} has no work"
        kept = Kept(service.store, record.id, record.tenant, created=record.created, previous=record.previous)
        run = kept.run = Run(kept, record.content.work, msgspec.json.decode(record.content.response))
        service.runs.by_id[run.kept.id] = run
        run.task = asyncio.create_task(_work_again(service, run, record))


async def cancel(service: Service, run: Run) -> None:
    """End a response at once. Errors: HttpError 500, 507."""
    if run.task is not None:
        run.task.cancel()
    if run.reply is not None:
        run.reply.end("cancelled")
    await run.finish({**run.snapshot, "status": "cancelled"})
    service.runs.by_id.pop(run.kept.id, None)


class _Streamed(msgspec.Struct):
    stream: bool | None = None


def _unheard(key: Key | None, request_id: str) -> Request:
    """Return a request whose answer is not read."""

    async def send(message: Message) -> None:
        """Drop it."""

    exchange = Exchange({"http_version": "1.1", "method": "POST", "headers": []}, send, NoWire())
    request = Request("POST", "/v1/responses", b"/v1/responses", b"", {}, exchange, num_hosts=0)
    request.key, request.id, request.route = key, request_id, "/v1/responses"
    return request


def _take(service: Service, run: Run, reply: Reply, answer: ResponsesFormat) -> None:
    """Follow a reply to its end."""
    run.reply = reply
    ended = asyncio.Event()
    reply.on_closed = ended.set
    if reply.is_ended:
        ended.set()
    service.runs.by_id[run.kept.id] = run
    run.task = asyncio.create_task(_attend(service, run, ended, answer))


async def _attend(service: Service, run: Run, ended: asyncio.Event, answer: ResponsesFormat) -> None:
    """Wait until a response has ended. One that the engine or the end of this server has cut is begun again."""
    await ended.wait()
    assert run.reply is not None, "it has not begun"
    error = run.reply.failure
    if error is None:
        service.runs.by_id.pop(run.kept.id, None)
    elif error.status == 503:
        await _work_again(service, run, None)
    else:
        await _fail(service, run, *answer.failed(error))


async def _work_again(service: Service, run: Run, record: Record | None) -> None:
    """Begin a response again, as soon as the engine takes it. record: None = it is read from the store."""
    pause_s = 0.0 if record is not None else _FIRST_PAUSE_S
    try:
        while not service.shared.is_draining:
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _MAX_PAUSE_S)
            try:
                answer, reply = await _submit(service, run)
            except Exception as error:
                failure = http_error(error, max_model_len=service.max_model_len)
                if failure.status in (429, 503):
                    continue
                if failure.status == 500:
                    _log.exception("the response %s failed", run.kept.id)
                fields = failure.fields()
                shown = {"code": str(fields["code"]), "message": fields["message"]}
                await _fail(service, run, {**run.snapshot, "status": "failed", "error": shown}, None)
                return
            _take(service, run, reply, answer)
            return
        run.leave()  # the next server takes it up
    except asyncio.CancelledError:
        run.leave()
        raise


async def _submit(service: Service, run: Run) -> tuple[ResponsesFormat, Reply]:
    """Prepare a response from what was stored, and submit it. Errors: HttpError; those of Service.submit()."""
    work, kept = run.work, run.kept
    service.standing.refuse_requests()
    if work.fingerprint != service.fingerprint:
        raise HttpError(422, "the model has changed since this response began")
    if work.is_streamed and not run.events and not is_exact(service):
        raise HttpError(422, "the server was restarted, and this engine does not repeat answers exactly")
    request = _unheard(key_of(service, kept.tenant), kept.id)
    request.body = work.body
    await service.adapters.catch_up()
    body = decoder.decode(work.body)
    name = service.check_model(request, work.model)
    history = [] if kept.previous is None else await history_of(service, request, kept.previous)
    prepared = await prepare(service, request, body, work.seed, history)
    first = prepared.requests[0]
    prompt = first.prompt._replace(token_ids=work.prompt)  # a template may say the day
    prepared = prepared._replace(requests=[first._replace(prompt=prompt)])
    answer = ResponsesFormat(service, body, name, prepared, kept=kept)
    return answer, await service.submit(request, prepared.requests, answer)


async def _fail(service: Service, run: Run, response: Json, event: bytes | None) -> None:
    """End a response with an error. If that cannot be stored, this server alone says it."""
    try:
        await run.finish(response, None if event is None else lambda: event)
    except HttpError as error:
        _log.error("the response %s: %s", run.kept.id, error)
        run.snapshot = response
        run.leave()
    else:
        service.runs.by_id.pop(run.kept.id, None)


# What requests and runs share.


def is_exact(service: Service) -> bool:
    """Return whether the engine gives the same tokens for the same request."""
    return service.engine.client.welcome.numerics.endswith("L2")


def key_of(service: Service, tenant: str) -> Key | None:
    """Return the key of a tenant, without its quotas; None if it has none."""
    return Key(tenant, b"") if tenant else None


def store_of(service: Service, param: str) -> ResponseStore:
    """Return the store of responses. Errors: HttpError 400 that names the field that needs one."""
    if service.store is None:
        text = f"{param} is not supported: nothing is stored here (the server was started without --store)"
        raise HttpError(400, f"{text}: send the earlier items in `input`", param=param)
    return service.store


async def history_of(service: Service, request: Request, previous: str) -> list[Json]:
    """Return the items of a stored response and of those before it, oldest first. Errors: HttpError 400, 500."""
    store = store_of(service, "previous_response_id")
    limit = service.options.max_body_bytes
    try:
        items, request.num_stored_bytes = await store.history(previous, tenant_of(request), limit)
    except HttpError as error:
        if error.status == 404:
            code = "previous_response_not_found"
            raise HttpError(400, str(error), param="previous_response_id", code=code) from None
        raise
    return items


async def prepare(
    service: Service, request: Request, body: ResponsesBody, seed: int | None, history: list[Json]
) -> PreparedChat:
    """Render and tokenize the chat of a response. seed: None = it is not computed in the background.

    Errors: as prepare_chat().
    """
    if seed is not None:
        body.seed, body.stream = seed, True
    return await prepare_chat(service, request, chat_of(body, service.meter.note_left_out, history))
