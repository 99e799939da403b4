"""Pooling requests of one HTTP request: submitted together, answered together."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence

from frontend.http.errors import HttpError
from frontend.http.holdings import vectors_bytes
from frontend.http.request import Request
from frontend.http.service import SUBMITTED_EACH_TURN, Service
from frontend.pooling import PreparedPooling, prepare_pooling, submit_pooling
from frontend.receipts import receipt_of
from frontend.results.pooling_outputs import PoolingRequestOutput
from frontend.results.pooling_state import PoolingState
from frontend.text.prompt_forms import PromptInput
from ipc.params.pooling_params import PoolingParams, PoolingTask
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
    prompt_name: str | None = None,
    *,
    add_special_tokens: bool = True,
    receipt: bool | None = None,
) -> list[PoolingRequestOutput]:
    """Return the answers of the engine, in the prompts' order. Errors: HttpError; those of the engine.

    receipt: whether they will have receipts, of receipts_of().
    """
    service.standing.refuse_requests()
    if receipt:
        check_provable(service.engine.client.welcome)
    if len(prompts) > MAX_TEXTS:
        raise HttpError(400, f"{len(prompts)} texts in one request; at most {MAX_TEXTS} are allowed", param="input")
    key = request.key
    if key is not None and key.min_priority is not None and priority < key.min_priority:
        raise HttpError(403, f"the key's smallest priority is {key.min_priority}", param="priority")

    def prepare() -> list[PreparedPooling]:
        return prepare_pooling(
            service.engine,
            prompts,
            params,
            task,
            priority=priority,
            deadline=request.deadline_s(),
            tenant="" if key is None else key.name,
            prompt_name=prompt_name,
            lora=request.adapter,
            add_special_tokens=add_special_tokens,
        )

    has_images = any(isinstance(one, Mapping) and "multi_modal_data" in one for one in prompts)
    prepared = await service.run(request, prepare, is_long=has_images)
    num_tokens = sum(len(one.prompt.token_ids) for one in prepared)
    width = service.engine.client.welcome.tasks.get(task, 1)
    give_back = service.holdings.take(vectors_bytes(len(prepared), num_tokens, width))
    try:
        if request.lease is not None:
            request.lease.reserve(num_tokens)
        return await _answers(service, request, prepared)
    finally:
        give_back()
        if request.lease is not None:
            request.lease.end(num_tokens)


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
