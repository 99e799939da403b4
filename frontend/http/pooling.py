"""Pooling requests of one HTTP request: submitted together, answered together."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec

from frontend.http.errors import HttpError
from frontend.http.holdings import vectors_bytes
from frontend.http.request import Request
from frontend.http.service import SUBMITTED_EACH_TURN, Service, tenant_of
from frontend.pooling import PreparedPooling, prepare_pooling, submit_pooling
from frontend.receipts import receipt_of
from frontend.results.pooling_outputs import PoolingRequestOutput
from frontend.results.pooling_state import PoolingState
from frontend.text.prompt_forms import PromptInput
from ipc.params.pooling_params import PoolingParams, PoolingTask, check_task
from ipc.records.receipt import check_provable

#: Most texts of one request.
MAX_TEXTS = 2048
_LEFT = "the peer has left"


async def pool(
    service: Service,
    request: Request,
    prompts: Sequence[PromptInput],
    params: PoolingParams,
    task: PoolingTask,
    priority: int = 0,
    *,
    receipt: bool | None = None,
) -> list[PoolingRequestOutput]:
    """Return the answers of the engine, in the prompts' order. Errors: HttpError; those of the engine.

    receipt: whether they will have receipts, of receipts_of().
    """
    check_pooling(service, request, len(prompts), params, task, priority, receipt=receipt)
    return await answer(service, request, await prepare(service, request, prompts, params, task, priority), task)


def check_pooling(
    service: Service,
    request: Request,
    num_prompts: int,
    params: PoolingParams,
    task: PoolingTask,
    priority: int = 0,
    *,
    receipt: bool | None = None,
) -> None:
    """Check all that can be said without reading a prompt. Parameters and errors: those of pool()."""
    service.standing.refuse_requests()
    if receipt:
        check_provable(service.engine.client.welcome)
    if num_prompts > MAX_TEXTS:
        raise HttpError(400, f"{num_prompts} texts in one request; at most {MAX_TEXTS} are allowed", param="input")
    key = request.key
    if key is not None and key.min_priority is not None and priority < key.min_priority:
        raise HttpError(403, f"the key's smallest priority is {key.min_priority}", param="priority")
    check_task(msgspec.structs.replace(params, task=task), service.engine.client.welcome.tasks, 1)


async def prepare(
    service: Service,
    request: Request,
    prompts: Sequence[PromptInput],
    params: PoolingParams,
    task: PoolingTask,
    priority: int = 0,
    prompt_name: str | None = None,
    *,
    add_special_tokens: bool = True,
) -> list[PreparedPooling]:
    """Read the prompts, each with images in a turn of its own. Errors: HttpError; those of prepare_pooling()."""
    limits, num_bytes = service.engine.client.welcome.features, 0
    for text in map(_text_of, prompts):
        if text is not None:
            service.check_text(text)

    def read(some: Sequence[PromptInput]) -> list[PreparedPooling]:
        return prepare_pooling(
            service.engine,
            some,
            params,
            task,
            priority=priority,
            deadline=request.deadline_s(),
            tenant=tenant_of(request),
            prompt_name=prompt_name,
            lora=request.adapter,
            add_special_tokens=add_special_tokens,
        )

    prepared: list[PreparedPooling] = []
    for some, have_images in _turns(prompts):
        made = await service.run(request, partial(read, some), is_long=have_images)
        if request.exchange.has_left:
            raise HttpError(499, _LEFT)
        prepared += made
        num_bytes += square_bytes(made)
        if limits is not None and num_bytes > limits.max_bytes:
            text = f"the images of a request take more than {limits.max_bytes} bytes as squares: send fewer in each"
            raise HttpError(400, text, param="input")
    return prepared


async def answer(
    service: Service, request: Request, prepared: Sequence[PreparedPooling], task: PoolingTask
) -> list[PoolingRequestOutput]:
    """Return the engine's answers to prepared requests. Errors: those of pool()."""
    num_tokens = sum(len(one.prompt.token_ids) for one in prepared)
    width = service.engine.client.welcome.tasks.get(task, 1)
    give_back = service.holdings.take(vectors_bytes(len(prepared), num_tokens, width) + square_bytes(prepared))
    try:
        if request.lease is not None:
            request.lease.reserve(num_tokens)
        return await _answers(service, request, prepared)
    finally:
        give_back()
        if request.lease is not None:
            request.lease.end(num_tokens)


def _has_images(prompt: PromptInput) -> bool:
    return isinstance(prompt, Mapping) and "multi_modal_data" in prompt


def _text_of(prompt: PromptInput) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _turns(prompts: Sequence[PromptInput]) -> Iterator[tuple[list[PromptInput], bool]]:
    """Return the prompts in order, each with images alone and others together; and whether they have images."""
    for have_images, some in itertools.groupby(prompts, _has_images):
        if have_images:
            yield from (([one], True) for one in some)
        else:
            yield list(some), False


def square_bytes(prepared: Sequence[PreparedPooling]) -> int:
    """Return the bytes of all images of the prompts, as squares."""
    return sum(len(one.feature.data) for each in prepared for one in each.prompt.features)


def receipts_of(service: Service, outputs: Sequence[PoolingRequestOutput], receipt: bool | None) -> dict[str, object]:
    """Return the field `receipts` of an answer, one for each of these outputs; no field if they are not asked for."""
    if not receipt:
        return {}
    engine = service.engine
    return {"receipts": [receipt_of(engine.client, one, service.receipt_key, engine.derive_seed) for one in outputs]}


def list_head(kind: str, name: str) -> dict[str, object]:
    """Return the first fields of an answer in vLLM's form. kind: beginning of its id; name: of the model."""
    return {"id": f"{kind}-{secrets.token_hex(16)}", "object": "list", "created": int(time.time()), "model": name}


async def _answers(
    service: Service, request: Request, prepared: Sequence[PreparedPooling]
) -> list[PoolingRequestOutput]:
    """Submit the requests and wait for their ends. If one fails, or the peer leaves, running ones are aborted."""
    exchange = request.exchange
    if exchange.has_left:  # while a thread prepared them
        raise HttpError(499, _LEFT)
    states: list[PoolingState] = []
    waited: list[asyncio.Future[None]] = []
    try:
        for index, one in enumerate(prepared):
            if index and index % SUBMITTED_EACH_TURN == 0:
                await asyncio.sleep(0)
            states.append(submit_pooling(service.engine, one))
            waited.append(service.pump.ended(states[-1].number))
        if exchange.has_left:
            raise HttpError(499, _LEFT)
        ends = asyncio.gather(*waited)

        def leave() -> None:
            ends.cancel()

        exchange.on_left = leave
        try:
            await ends
        except asyncio.CancelledError:
            if exchange.has_left:
                raise HttpError(499, _LEFT) from None
            raise
        outputs: list[PoolingRequestOutput] = []
        for index, state in enumerate(states):
            if index and index % SUBMITTED_EACH_TURN == 0:
                await asyncio.sleep(0)
            if (output := service.engine.advance(state)) is not None:
                outputs.append(output)
        return outputs
    finally:
        exchange.on_left = None
        numbers = [state.number for state in states]
        service.pump.forget(numbers)
        for end in waited:
            end.cancel()
        service.engine.client.discard(numbers)
