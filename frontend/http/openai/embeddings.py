"""/v1/embeddings, /pooling and /classify, Ollama's /api/embed and /api/embeddings: handlers, and forms of answers."""

import base64
import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from frontend.http.bodies import ChatBody, Json
from frontend.http.chat_request import check_chat, render_prompt, with_fetched
from frontend.http.errors import HttpError
from frontend.http.pooling import PoolingCall, answer, check_pooling, list_head, pool, prepare, receipts_of
from frontend.http.replies.answer_format import json_bytes, raw_list
from frontend.http.request import Request, Response
from frontend.http.service import Service
from frontend.images.chat_images import has_images, take_images
from frontend.images.sources import MAX_PIXELS, MAX_PROMPT_PIXELS
from frontend.pooling import lacks_special_tokens
from frontend.results.pooling_outputs import PoolingRequestOutput
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import split_prompts
from ipc.params.pooling_params import PoolingParams, PoolingTask


class PoolingFields(msgspec.Struct, kw_only=True):
    """What bodies that ask for vectors have. input: a text, texts, token ids or lists of token ids; or a list in which
    each entry may also be {"text": ...} or {"image": ...}, Jina's form.

    messages: a chat in place of an input, as one prompt, which may have images; see ChatBody for its fields.
    """

    input: Any = None
    messages: list[Json] | None = None
    add_generation_prompt: bool | None = None  # None = as the model's files say; otherwise false, as in vLLM
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    add_special_tokens: bool | None = None  # None = true, but not for a chat whose template writes them
    model: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None  # see PoolingParams
    user: Any = None
    request_id: Any = None
    receipt: bool | None = None  # docs/receipts.md

    # Refused by name.
    truncation_side: Any = None
    mm_processor_kwargs: Any = None


class ClassifyBody(PoolingFields, kw_only=True):
    """The body of /classify."""

    activation: bool | None = None  # an older name of use_activation


class EmbeddingBody(PoolingFields, kw_only=True):
    """The body of /v1/embeddings."""

    encoding_format: str | None = None  # float (the default) or base64
    dimensions: int | None = None
    prompt_name: str | None = None  # see LLM.encode()
    input_type: str | None = None  # query or document; see TextPrompts.name_for()
    task: str | None = None  # of /v1/embeddings: Jina's name of the adapter
    normalize: bool | None = None  # an older name of use_activation
    embed_dtype: str | None = None  # of base64: float32 (the default) or float16
    endianness: str | None = None  # of base64: native, little (the default) or big


class PoolingBody(EmbeddingBody, kw_only=True):
    """The body of /pooling. task: None = vectors of each token, if the model has any."""

    task: PoolingTask | None = None
    activation: bool | None = None
    softmax: bool | None = None  # older names of use_activation


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """The body of /api/embed. truncate: whether a text that is too long is cut, as in Ollama; None = true."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Any = None
    keep_alive: Any = None


class OllamaOldBody(msgspec.Struct, kw_only=True):
    """The body of /api/embeddings, which embeds one text."""

    model: str
    prompt: str
    options: Any = None
    keep_alive: Any = None


_DTYPES: dict[str | None, str] = {None: "f4", "float32": "f4", "float16": "f2"}
_ORDERS: dict[str | None, str] = {None: "<", "native": "<", "little": "<", "big": ">"}  # x86 is little-endian
_FEW = 16  # most vectors written in the event loop
#: Most images of one request in Jina's form, each of which is a prompt: as many pixels as one prompt may have.
_MOST_IMAGES = MAX_PROMPT_PIXELS // MAX_PIXELS
_INSTEAD = {
    "truncation_side": "truncate_prompt_tokens keeps the tokens at the prompt's end",
    "mm_processor_kwargs": "--image-max-pixels makes images smaller",
}
_decoder = msgspec.json.Decoder(EmbeddingBody)
_classify_decoder = msgspec.json.Decoder(ClassifyBody)
_pooling_decoder = msgspec.json.Decoder(PoolingBody)
_old_decoder = msgspec.json.Decoder(OllamaOldBody)
_ollama_decoder = msgspec.json.Decoder(OllamaEmbedBody)


async def create_embeddings(service: Service, request: Request) -> Response:
    """Embed one text or many."""
    body = request.decode(_decoder)
    name = service.check_model(request, body.model)
    if body.task is not None:
        service.choose_adapter(request, body.task, body.model)
    params = PoolingParams(dimensions=body.dimensions, use_activation=_first(body.use_activation, body.normalize))
    outputs, shown = await _pooled(service, request, body, params, "embed")

    def work() -> bytes:
        data = raw_list(
            {"object": "embedding", "index": index, "embedding": shown(output)} for index, output in enumerate(outputs)
        )
        fields = {"object": "list", "data": data, "model": name, "usage": _usage(outputs)}
        return json_bytes({**fields, **receipts_of(service, outputs, body.receipt)})

    return Response(await service.run(request, work, is_long=len(outputs) > _FEW))


async def create_pooling(service: Service, request: Request) -> Response:
    """Return the vectors that the model makes of one text or many, also those of each token."""
    body = request.decode(_pooling_decoder)
    name = service.check_model(request, body.model)
    tasks = service.engine.client.welcome.tasks
    of_tokens: tuple[PoolingTask, ...] = ("token_embed", "token_classify", "embed")
    usual = next((one for one in of_tokens if one in tasks), of_tokens[-1])
    task = usual if body.task is None else body.task
    is_active = _first(body.use_activation, body.activation, body.normalize, body.softmax)
    params = PoolingParams(dimensions=body.dimensions, use_activation=is_active)
    outputs, shown = await _pooled(service, request, body, params, task)

    def work() -> bytes:
        data = raw_list(
            {"object": "pooling", "index": index, "data": shown(output)} for index, output in enumerate(outputs)
        )
        fields = {**list_head("pool", name), "data": data, "usage": _usage(outputs)}
        return json_bytes({**fields, **receipts_of(service, outputs, body.receipt)})

    return Response(await service.run(request, work, is_long=True))


async def classify(service: Service, request: Request) -> Response:
    """Return the probabilities of the model's labels for one text or many."""
    body = request.decode(_classify_decoder)
    name = service.check_model(request, body.model)
    description = service.engine.client.welcome.description
    labels = [] if description is None else description.labels
    params = PoolingParams(use_activation=_first(body.use_activation, body.activation))
    outputs = await _pool(service, request, body, params, "classify")

    def shown(index: int, output: PoolingRequestOutput) -> Json:
        best = int(output.outputs.data.argmax())
        label = labels[best] if best < len(labels) else None
        return {"index": index, "label": label, "probs": _numbers(output), "num_classes": len(output.outputs.data)}

    def work() -> bytes:
        data = raw_list(shown(index, output) for index, output in enumerate(outputs))
        fields = {**list_head("classify", name), "data": data, "usage": _usage(outputs)}
        return json_bytes({**fields, **receipts_of(service, outputs, body.receipt)})

    return Response(await service.run(request, work, is_long=len(outputs) > _FEW))


async def _pooled(
    service: Service, request: Request, body: EmbeddingBody, params: PoolingParams, task: PoolingTask
) -> tuple[list[PoolingRequestOutput], Callable[[PoolingRequestOutput], Any]]:
    """Return the engine's answers, and how the body wants each shown."""
    if body.encoding_format not in (None, "float", "base64"):
        text = f"encoding_format is float or base64, got {body.encoding_format!r:.40}"
        raise HttpError(400, text, param="encoding_format")
    dtype = _dtype_of(body)
    name = body.prompt_name
    if body.input_type is not None:
        if name is not None:
            raise HttpError(400, "send prompt_name or input_type, one of them", param="input_type")
        name = service.tokenizer.text_prompts.name_for(body.input_type)
    outputs = await _pool(service, request, body, params, task, name)
    return outputs, partial(_encoded, dtype=dtype) if body.encoding_format == "base64" else _numbers


async def _pool(
    service: Service,
    request: Request,
    body: PoolingFields,
    params: PoolingParams,
    task: PoolingTask,
    prompt_name: str | None = None,
) -> list[PoolingRequestOutput]:
    """Return the engine's answers to a body. Errors: HttpError; those of pool()."""
    for field, instead in _INSTEAD.items():
        if (value := getattr(body, field)) is not None and value not in ("left", {}, False):
            raise HttpError(400, f"{field} is not supported: {instead}", param=field)
    params = msgspec.structs.replace(params, truncate_prompt_tokens=body.truncate_prompt_tokens)
    inputs, is_chat, special = _inputs_of(body), body.messages is not None, True
    call = PoolingCall(params, task, body.priority or 0, body.receipt, prompt_name)
    check_pooling(service, request, inputs, call)
    chats = [one for one in inputs if isinstance(one, ChatBody)]
    if chats:  # before their images are fetched
        for one in inputs:
            if isinstance(one, str):
                service.check_countable(one)
    for chat in chats:
        check_chat(service, chat)
        if body.truncate_prompt_tokens is not None and has_images(chat.messages):
            text = "truncate_prompt_tokens cannot be used for a prompt with images"
            raise HttpError(400, text, param="truncate_prompt_tokens")
    if is_chat and task.endswith("embed"):  # the chat template decides where the model's prompt is
        prompts_of_model = service.tokenizer.text_prompts
        chats[0].messages = prompts_of_model.before_chat(chats[0].messages, prompt_name or "")
        if body.add_generation_prompt is None and not body.continue_final_message:
            chats[0].add_generation_prompt = prompts_of_model.opens_answer
        call = call._replace(prompt_name="")
    if any(has_images(chat.messages) for chat in chats):
        service.holdings.check(1)  # before they are fetched
    render = render_prompt if is_chat else _image_alone
    with contextlib.ExitStack() as held:
        async with with_fetched(service, request, chats):
            prompts = [await render(service, request, one) if isinstance(one, ChatBody) else one for one in inputs]
            if is_chat:
                special = lacks_special_tokens(service.engine, prompts[0])
            if body.add_special_tokens is not None:
                special = body.add_special_tokens
            prepared = await prepare(service, request, prompts, call, held, add_special_tokens=special)
        return await answer(service, request, prepared, task)


async def _image_alone(service: Service, request: Request, chat: ChatBody) -> PromptInput:
    """Return the prompt of a chat that is an image, without what a chat template writes around it."""
    images = service.engine.images

    def take() -> PromptInput:
        taken = take_images(chat.messages, takes_files=False)[1]
        return {"prompt": "" if images is None else images.mark, "multi_modal_data": {"image": taken}}

    return await service.run(request, take, is_long=True)


def _inputs_of(body: PoolingFields) -> list[PromptInput | ChatBody]:
    """Return the prompts of a body, of which those with images are chats. Errors: HttpError 400."""
    if body.messages is not None:
        if body.input is not None:
            raise HttpError(400, "send input or messages, one of them", param="input")
        chat = ChatBody(
            messages=body.messages,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        return [chat]
    if body.input in (None, "", []):
        text = "input is missing: send a text, texts, token ids or lists of token ids, or messages"
        raise HttpError(400, text, param="input")
    inputs = [_in_parts(one) if isinstance(one, Mapping) else one for one in split_prompts(body.input)]
    if (count := sum(isinstance(one, ChatBody) for one in inputs)) > _MOST_IMAGES:
        raise HttpError(400, f"{count} images in one request; at most {_MOST_IMAGES} are allowed", param="input")
    return inputs


def _in_parts(given: Mapping[str, Any]) -> PromptInput | ChatBody:
    """Return an entry of an input in Jina's form. Errors: HttpError 400."""
    text, image = given.get("text"), given.get("image")
    if len(given) != 1 or not isinstance(text or image, str):
        text = 'an entry of input is a text, token ids, {"text": ...} or {"image": ...}: a URL, or a file in base64'
        raise HttpError(400, f"{text}; text and images together are messages", param="input")
    if text is not None:
        return str(text)
    url = str(image) if "://" in str(image) or str(image).startswith("data:") else f"data:;base64,{image}"
    return ChatBody(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


async def embed(service: Service, request: Request) -> Response:
    """Embed one text or many, for Ollama's programs."""
    body, begin = request.decode(_ollama_decoder), time.monotonic_ns()
    name = service.check_model(request, body.model.removesuffix(":latest"))
    texts = [body.input] if isinstance(body.input, str) else body.input
    params = PoolingParams(dimensions=body.dimensions, truncate_prompt_tokens=None if body.truncate is False else -1)
    outputs = await pool(service, request, list(texts), PoolingCall(params, "embed")) if texts else []
    took = time.monotonic_ns() - begin

    def work() -> bytes:
        answer = {"model": name, "embeddings": raw_list(map(_numbers, outputs)), "total_duration": took}
        return json_bytes({**answer, "load_duration": 0, "prompt_eval_count": _num_tokens(outputs)})

    return Response(await service.run(request, work, is_long=len(outputs) > _FEW))


async def embed_one(service: Service, request: Request) -> Response:
    """Embed one text, for Ollama's older programs."""
    body = request.decode(_old_decoder)
    service.check_model(request, body.model.removesuffix(":latest"))
    call = PoolingCall(PoolingParams(truncate_prompt_tokens=-1), "embed")
    outputs = await pool(service, request, [body.prompt], call)
    return Response(json_bytes({"embedding": _numbers(outputs[0])}))


def _numbers(output: PoolingRequestOutput) -> list[Any]:
    numbers: list[Any] = output.outputs.data.tolist()
    return numbers


def _encoded(output: PoolingRequestOutput, dtype: np.dtype[Any]) -> str:
    """Return the numbers in base64, the form that OpenAI's clients request."""
    return base64.b64encode(output.outputs.data.astype(dtype, copy=False).tobytes()).decode()


def _dtype_of(body: EmbeddingBody) -> np.dtype[Any]:
    """Return the type of the numbers in base64. Errors: HttpError 400 that names the field, also those refused."""
    width, order = _DTYPES.get(body.embed_dtype), _ORDERS.get(body.endianness)
    if width is None:
        text = f"embed_dtype must be float32 or float16, got {body.embed_dtype!r:.40}"
        raise HttpError(400, text, param="embed_dtype")
    if order is None:
        text = f"endianness must be native, little or big, got {body.endianness!r:.40}"
        raise HttpError(400, text, param="endianness")
    return np.dtype(order + width)


def _first(*given: bool | None) -> bool | None:
    """Return the value of the first of a field's names that has one."""
    return next((one for one in given if one is not None), None)


def _usage(outputs: list[PoolingRequestOutput]) -> Json:
    count = _num_tokens(outputs)
    return {"prompt_tokens": count, "total_tokens": count}


def _num_tokens(outputs: list[PoolingRequestOutput]) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)
