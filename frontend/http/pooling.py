"""Pooling requests of one HTTP request: submitted together, answered together."""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from frontend.http.errors import PEER_LEFT, HttpError
from frontend.http.holdings import MAX_BYTES, features_bytes, vectors_bytes
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


class PoolingCall(NamedTuple):
    """What all prompts of one HTTP request are computed for.

    receipt: whether the answers will have receipts, of receipts_of(). prompt_name: see prepare_pooling().
    """

    params: PoolingParams
    task: PoolingTask
    priority: int = 0
    receipt: bool | None = None
    prompt_name: str | None = None


async def pool(
    service: Service, request: Request, prompts: Sequence[PromptInput], call: PoolingCall
) -> list[PoolingRequestOutput]:
    """Return the answers of the engine, in the prompts' order. Errors: HttpError; those of the engine."""
    check_pooling(service, request, prompts, call)
    with contextlib.ExitStack() as held:
        return await answer(service, request, await prepare(service, request, prompts, call, held), call.task)


def check_pooling(service: Service, request: Request, prompts: Sequence[object], call: PoolingCall) -> None:
    """Check all that can be said without reading a prompt or fetching an image.

    prompts: a chat counts as one whose text is not known yet. Errors: those of pool().
    """
    service.standing.refuse_requests()
    if call.receipt:
        check_provable(service.engine.client.welcome)
    if len(prompts) > MAX_TEXTS:
        raise HttpError(400, f"{len(prompts)} texts in one request; at most {MAX_TEXTS} are allowed", param="input")
    key = request.key
    if key is not None and key.min_priority is not None and call.priority < key.min_priority:
        raise HttpError(403, f"the key's smallest priority is {key.min_priority}", param="priority")
    check_task(msgspec.structs.replace(call.params, task=call.task), service.engine.client.welcome.tasks, 1)
    if call.prompt_name:
        if not call.task.endswith("embed"):
            raise HttpError(400, "prompt_name is only for texts to embed", param="prompt_name")
        service.tokenizer.text_prompts.named(call.prompt_name)
    service.check_prompts(request, prompts, is_cut=call.params.truncate_prompt_tokens is not None)


async def prepare(
    service: Service,
    request: Request,
    prompts: Sequence[PromptInput],
    call: PoolingCall,
    held: contextlib.ExitStack,
    *,
    add_special_tokens: bool = True,
) -> list[PreparedPooling]:
    """Read the prompts, each with images in a turn of its own. Errors: HttpError; those of prepare_pooling().

    held: gives back the memory of images as squares, which counts from when they are made: other requests' turns are
    between those of this one.
    """
    limits, num_bytes = service.engine.client.welcome.features, 0

    def read(some: Sequence[PromptInput]) -> list[PreparedPooling]:
        return prepare_pooling(
            service.engine,
            some,
            call.params,
            call.task,
            priority=call.priority,
            deadline=request.deadline_s(),
            tenant=tenant_of(request),
            prompt_name=call.prompt_name,
            lora=request.adapter,
            add_special_tokens=add_special_tokens,
        )

    prepared: list[PreparedPooling] = []
    for some, have_images in _turns(prompts):
        if request.exchange.has_left:
            raise HttpError(499, PEER_LEFT)
        if have_images:
            service.holdings.check(1, own=num_bytes)
        made = await service.run(request, partial(read, some), is_long=have_images)
        prepared += made
        size = features_bytes(one.prompt for one in made)
        if size:
            held.callback(service.holdings.take(size, own=num_bytes))
        num_bytes += size
        if limits is not None and num_bytes > limits.max_bytes:
            text = f"the images of a request take more than {limits.max_bytes} bytes as squares: send fewer in each"
            raise HttpError(400, text, param="input")
    return prepared


async def answer(
    service: Service, request: Request, prepared: Sequence[PreparedPooling], task: PoolingTask
) -> list[PoolingRequestOutput]:
    """Return the engine's answers to prepared requests, whose squares are counted. Errors: those of pool()."""
    num_tokens = sum(len(one.prompt.token_ids) for one in prepared)
    num_bytes = _answer_bytes(service, prepared, task, num_tokens)
    give_back = service.holdings.take(num_bytes, own=features_bytes(one.prompt for one in prepared))
    try:
        if request.lease is not None:
            request.lease.reserve(num_tokens)
        return await _answers(service, request, prepared)
    finally:
        give_back()
        if request.lease is not None:
            request.lease.end(num_tokens)


def _answer_bytes(service: Service, prepared: Sequence[PreparedPooling], task: PoolingTask, num_tokens: int) -> int:
    """Return the memory of the answers. Errors: HttpError 400 for too many vectors of tokens.

    One prompt has at most MAX_POOLED_BYTES of them, but there may be MAX_TEXTS prompts.
    """
    of_tokens = task.startswith("token_")
    width = prepared[0].params.dimensions or service.engine.client.welcome.tasks.get(task, 1)
    num_vectors = num_tokens if of_tokens else len(prepared)
    num_bytes = vectors_bytes(len(prepared), num_tokens, num_vectors * width)
    if of_tokens and len(prepared) > 1 and num_bytes > MAX_BYTES:
        text = f"{num_tokens} tokens have vectors of {num_vectors * width} numbers together, which take too much memory"
        raise HttpError(400, f"{text}: send fewer texts in each request", param="input")
    return num_bytes


def _has_images(prompt: PromptInput) -> bool:
    return isinstance(prompt, Mapping) and "multi_modal_data" in prompt


def _turns(prompts: Sequence[PromptInput]) -> Iterator[tuple[list[PromptInput], bool]]:
    """Return the prompts in order, each with images alone and others together; and whether they have images."""
    for have_images, some in itertools.groupby(prompts, _has_images):
        if have_images:
            yield from (([one], True) for one in some)
        else:
            yield list(some), False


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
        raise HttpError(499, PEER_LEFT)
    states: list[PoolingState] = []
    waited: list[asyncio.Future[None]] = []
    try:
        for index, one in enumerate(prepared):
            if index and index % SUBMITTED_EACH_TURN == 0:
                await asyncio.sleep(0)
            states.append(submit_pooling(service.engine, one))
            waited.append(service.pump.ended(states[-1].number))
        if exchange.has_left:
            raise HttpError(499, PEER_LEFT)
        ends = asyncio.gather(*waited)

        def leave() -> None:
            ends.cancel()

        exchange.on_left = leave
        try:
            await ends
        except asyncio.CancelledError:
            if exchange.has_left:
                raise HttpError(499, PEER_LEFT) from None
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
