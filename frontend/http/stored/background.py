"""Responses that are computed in the background: begun by a request, and taken up again by the next server.

If a server is killed, the response is computed again from its beginning, with the same prompt, parameters and seed. An
engine of level L2 gives the same tokens, so its events have the same numbers and bytes.
"""

import asyncio
import logging
import time
from typing import NamedTuple

import msgspec

from frontend.http.bodies import Json
from frontend.http.callers.keys import Key
from frontend.http.chat_request import PreparedChat, prepare_chat
from frontend.http.errors import HttpError, http_error
from frontend.http.openai.responses import ResponsesFormat
from frontend.http.openai.responses_bodies import ResponsesBody, chat_of, items_of, last_items
from frontend.http.replies.reply import Reply
from frontend.http.request import Request
from frontend.http.served import Served
from frontend.http.service import Service, tenant_of
from frontend.http.shared import Shared
from frontend.http.stored.runs import Kept, Run, Runs
from frontend.http.stored.slots import Slots
from frontend.http.stored.store import Record, ResponseStore, Work
from frontend.http.wire.exchange import Exchange, Message, NoWire
from ipc.errors import PromptTooLongError

decoder = msgspec.json.Decoder(ResponsesBody)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0  # before a response that was refused is begun again
_AT_FIRST, _DOUBLED_S = 8, 30.0  # see _GrowingSlots
_log = logging.getLogger("engine_core.http")


async def begin(
    service: Service,
    request: Request,
    body: ResponsesBody,
    name: str,
    *,
    kept: Kept,
    prepared: PreparedChat,
    last_item: int,
) -> Run:
    """Store a response that has not begun, and begin it. last_item: see Work.

    Errors: HttpError; those of Service.submit().
    """
    assert service.store is not None, "nothing is stored here"
    assert body.seed is not None, "the draws could not be repeated"
    prompt = prepared.requests[0].prompt.token_ids
    is_streamed = msgspec.json.decode(request.body, type=_Streamed).stream is True
    work = Work(request.body, name, body.seed, prompt, service.fingerprint, is_streamed, last_item)
    run = kept.run = Run(kept, work, {})
    answer = ResponsesFormat(service, body, name, prepared, kept=kept)
    await kept.put(answer.begun(), work)
    inner = _unheard(request.key, request.id)
    inner.lease, request.lease = request.lease, None
    inner.wants_receipts = request.wants_receipts
    inner.on_end, request.on_end = request.on_end, None  # the model stays until the response has ended
    inner.held, request.held = request.held, None
    try:
        reply = await service.submit(inner, prepared.requests, answer)
    except BaseException:
        inner.end()
        await service.store.delete(kept.id, tenant_of(request))
        raise
    service.runs.by_id[run.kept.id] = run
    run.task = asyncio.create_task(_work(service.shared, run, _follow(run, _Begun(inner, answer, reply))))
    return run


async def resume(served: Served) -> None:
    """Take up the responses that an earlier server has left, as far as the store can be read.

    They are begun again from their beginning, the oldest first, and only some at a time: if all began at once and the
    servers lived shorter than all of them take together, none would ever end.
    """
    shared = served.shared
    if shared.store is None:
        return
    shared.runs.find = served.service_for
    try:
        left = await shared.store.unfinished()
    except HttpError as error:
        _log.error("no response is taken up again: %s", error)
        return
    slots = _GrowingSlots()
    for record in left:
        assert record.content.work is not None, f"{record.id} has no work"
        kept = kept_of(shared.store, record)
        run = kept.run = Run(kept, record.content.work, msgspec.json.decode(record.content.response))
        shared.runs.by_id[run.kept.id] = run
        run.task = asyncio.create_task(_work_in_turn(shared, run, slots))
    shared.runs.keeper = asyncio.create_task(_keep(slots))


class _GrowingSlots(Slots):
    """Places of responses that are taken up: one more for each that has ended, and twice as many after each while."""

    def __init__(self) -> None:
        self.num_ended, begun_at = 0, time.monotonic()
        super().__init__(lambda: (_AT_FIRST + self.num_ended) << int((time.monotonic() - begun_at) / _DOUBLED_S))


async def _keep(slots: Slots) -> None:
    """Give out the places whose number grows with time."""
    while slots.is_awaited:
        await asyncio.sleep(_DOUBLED_S)
        slots.admit()


async def _work_in_turn(shared: Shared, run: Run, slots: _GrowingSlots) -> None:
    """Compute a response again, once it is its turn."""
    try:
        await slots.take(run.kept.tenant)
    except asyncio.CancelledError:
        run.leave()
        raise
    try:
        await _work(shared, run, None)
    finally:
        slots.num_ended += 1
        slots.give()


async def cancel(runs: Runs, run: Run) -> None:
    """End a response at once. Errors: HttpError 500, 507."""
    if run.task is not None:
        run.task.cancel()
    if run.reply is not None:
        run.reply.end("cancelled")
    await run.finish({**run.snapshot, "status": "cancelled"})
    runs.by_id.pop(run.kept.id, None)


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


class _Begun(NamedTuple):
    """A response that an engine computes."""

    request: Request
    answer: ResponsesFormat
    reply: Reply


def _follow(run: Run, begun: _Begun) -> ResponsesFormat:
    """Follow a reply to its end; return its format."""
    run.reply, run.computed = begun.reply, asyncio.Event()

    def on_closed() -> None:
        begun.request.end()
        run.computed.set()

    begun.reply.on_closed = on_closed
    if begun.reply.is_ended:
        on_closed()
    return begun.answer


async def _work(shared: Shared, run: Run, answer: ResponsesFormat | None) -> None:
    """Wait until a response has ended. One that the engine or the end of a server has cut is begun again.

    answer: None = this server has not begun it before.
    """
    pause_s = 0.0 if answer is None else _FIRST_PAUSE_S
    try:
        while (answer := answer or await _begin_again(shared, run, pause_s)) is not None:
            await run.computed.wait()
            assert run.reply is not None, "it has begun"
            error = run.reply.failure
            if error is None:
                shared.runs.by_id.pop(run.kept.id, None)
                return
            if error.status != 503:
                await _fail(shared, run, *answer.failed(error))
                return
            answer, pause_s = None, _FIRST_PAUSE_S
    except asyncio.CancelledError:
        run.leave()
        raise
    run.leave()  # the next server takes it up, or it has failed


async def _begin_again(shared: Shared, run: Run, pause_s: float) -> ResponsesFormat | None:
    """Begin a response again, as soon as an engine takes it; return None if it has failed, or this server ends.

    pause_s: before the first attempt.
    """
    while not shared.is_draining:
        await asyncio.sleep(pause_s)
        pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _MAX_PAUSE_S)
        request = _unheard(key_of(run.kept.tenant), run.kept.id)
        try:
            return _follow(run, await _submit(shared, run, request))
        except asyncio.CancelledError:
            request.end()
            raise
        except Exception as error:
            request.end()
            length = 0 if request.service is None else request.service.max_model_len
            failure = http_error(error, max_model_len=length)
            if failure.status in (429, 503):
                continue
            if failure.status == 500:
                _log.exception("the response %s failed", run.kept.id)
        fields = failure.fields()
        shown = {"code": str(fields["code"]), "message": fields["message"]}
        await _fail(shared, run, {**run.snapshot, "status": "failed", "error": shown}, None)
        break
    return None


async def _submit(shared: Shared, run: Run, request: Request) -> _Begun:
    """Prepare a response from what was stored, and submit it. Errors: HttpError; those of Service.submit()."""
    work, kept = run.work, run.kept
    request.body = msgspec.json.encode({"model": work.model})
    service: Service = await shared.runs.find(request)
    request.service = service
    service.standing.refuse_requests()
    if work.fingerprint != service.fingerprint:
        raise HttpError(422, "the model has changed since this response began")
    if work.is_streamed and not run.events and not is_exact(service):
        raise HttpError(422, "the server was restarted, and this engine does not repeat answers exactly")
    request.body = work.body
    await service.adapters.catch_up()
    body = decoder.decode(work.body)
    name = service.check_model(request, work.model)
    history, _ = await history_of(service, request, kept.previous, kept.conversation, until=work.last_item)
    prepared = await prepare(service, request, body, work.seed, history)
    first = prepared.requests[0]
    prompt = first.prompt._replace(token_ids=work.prompt)  # a template may say the day
    prepared = prepared._replace(requests=[first._replace(prompt=prompt)])
    answer = ResponsesFormat(service, body, name, prepared, kept=kept)
    return _Begun(request, answer, await service.submit(request, prepared.requests, answer))


async def _fail(shared: Shared, run: Run, response: Json, event: bytes | None) -> None:
    """End a response with an error. If that cannot be stored, this server alone says it."""
    try:
        await run.finish(response, None if event is None else lambda: event)
    except HttpError as error:
        _log.error("the response %s: %s", run.kept.id, error)
        run.snapshot = response
        run.leave()
    else:
        shared.runs.by_id.pop(run.kept.id, None)


# What requests and runs share.


def is_exact(service: Service) -> bool:
    """Return whether the engine gives the same tokens for the same request."""
    return service.engine.client.welcome.numerics.endswith("L2")


def key_of(tenant: str) -> Key | None:
    """Return the key of a tenant, without its quotas; None if it has none."""
    return Key(tenant, b"") if tenant else None


def store_of(service: Service, param: str) -> ResponseStore:
    """Return the store of responses. Errors: HttpError 400 that names the field that needs one."""
    if service.store is None:
        text = f"{param} is not supported: nothing is stored here (the server was started without --store)"
        raise HttpError(400, f"{text}: send the earlier items in `input`", param=param)
    return service.store


def kept_of(store: ResponseStore, record: Record) -> Kept:
    """Return how a stored response is stored."""
    conversation = record.content.conversation
    return Kept(
        store,
        record.id,
        record.tenant,
        created=record.created,
        previous=record.previous,
        conversation=conversation,
    )


async def history_of(
    service: Service, request: Request, previous: str | None, conversation: str | None, until: int | None = None
) -> tuple[list[Json], int]:
    """Return the items of a stored response and of those before it, or of a conversation, oldest first, and the number
    of the last item of the conversation.

    until: number of the last one that is wanted. Errors: HttpError 400, 500.
    """
    limit, tenant, last = service.options.max_body_bytes, tenant_of(request), -1
    items = list[Json]()
    name = "previous_response_id" if conversation is None else "conversation"
    try:
        if previous is not None:
            items, request.num_stored_bytes = await store_of(service, name).history(previous, tenant, limit)
        elif conversation is not None:
            store_of(service, name)
            conversations = service.shared.conversations
            assert conversations is not None, "there is a store"
            items, request.num_stored_bytes, last = await conversations.history(conversation, tenant, limit, until)
    except HttpError as error:
        if error.status == 404:
            code = "previous_response_not_found" if conversation is None else "conversation_not_found"
            raise HttpError(400, str(error), param=name, code=code) from None
        raise
    return items, last


async def prepare(
    service: Service, request: Request, body: ResponsesBody, seed: int | None, history: list[Json]
) -> PreparedChat:
    """Render and tokenize the chat of a response. seed: None = it is not computed in the background.

    With truncation: auto, the fewest items are left out from the beginning that let it fit. Errors: as prepare_chat().
    """
    if seed is not None:
        body.seed, body.stream = seed, True
    note = service.meter.note_left_out
    try:
        return await prepare_chat(service, request, chat_of(body, note, history))
    except (HttpError, PromptTooLongError) as error:
        if body.truncation != "auto" or not _is_too_long(error):
            raise
        last_error = error
    items, found = [*history, *items_of(body)], None
    low, high = 1, len(items) - 1  # of the number of items that are left out
    while low <= high:
        middle = (low + high) // 2
        shorter = msgspec.structs.replace(body, input=last_items(items, middle))
        try:
            found = await prepare_chat(service, request, chat_of(shorter, note))
            high = middle - 1
        except (HttpError, PromptTooLongError) as error:
            if not _is_too_long(error):
                raise
            last_error, low = error, middle + 1
    if found is None:
        raise last_error
    return found


def _is_too_long(error: Exception) -> bool:
    return isinstance(error, PromptTooLongError) or getattr(error, "code", None) == "context_length_exceeded"
