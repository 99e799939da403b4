"""AsyncLLM: requests as async iterators, many concurrently on one event loop."""

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from frontend.absent_methods import AbsentMethods
from frontend.call_arguments import check_neutral
from frontend.client.client import EngineClient
from frontend.engine_args import EngineArgs, arguments_of
from frontend.llm_engine import ModelDescription, describe_model
from frontend.lora import LoRARequest
from frontend.pooling import prepare_chats, prepare_pooling, submit_pooling
from frontend.receipts import Answer
from frontend.results.beam_search import BeamSearchOutput, beam_search_output, sampling_params
from frontend.results.outputs import RequestOutput
from frontend.results.pooling_outputs import EmbeddingRequestOutput, PoolingRequestOutput, embedding_of
from frontend.results.state import Output, State
from frontend.session import EngineHandle, Message
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import split_prompts
from frontend.text.tokenizer import Tokenizer
from frontend.weights import UpdateModeName, WeightsInput, update_weights, wake_up
from ipc.errors import EngineCoreError, EngineDeadError, InvalidRequestError
from ipc.params.beam_search import BeamSearchParams
from ipc.params.pooling_params import PoolingParams, PoolingTask
from ipc.params.sampling_params import SamplingParams
from ipc.records.receipt import Receipt
from ipc.wire.messages import Statistics
from ipc.wire.pin_messages import Pin, PinList
from ipc.wire.scheduling_messages import KVEvents
from ipc.wire.weights_messages import WeightsMark

# Waker: wakes the iterators of an event loop when their requests have news.


class Waker:
    """Wakes iterators of the event loop when their requests have news: one callback per received batch.

    The client has a reference to it, so it must not refer to the AsyncLLM, which could then never be collected.
    """

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._client = client
        self._news: dict[int, asyncio.Event] = {}
        self._scheduled = threading.Event()
        client.add_listener(self._on_news)

    def register(self, number: int) -> asyncio.Event:
        """Return the event that is set when the request has news. Called in the loop, so no news is missed."""
        event = self._news[number] = asyncio.Event()
        return event

    def forget(self, number: int) -> None:
        """Drop the event of a request whose iterator is gone."""
        self._news.pop(number, None)

    def move(self, loop: asyncio.AbstractEventLoop) -> None:
        """Continue in another loop if the old one is closed. Called in the new one. Tasks of the old one never run."""
        self._news.clear()
        self.loop = loop  # before the flag: later news is for the new loop
        self._scheduled.clear()
        loop.call_soon(self._wake)

    def _on_news(self) -> None:
        """Schedule _wake() in the loop, unless it is scheduled. Called by the client's IO thread."""
        if self._scheduled.is_set():
            return
        self._scheduled.set()
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed, so there is no iterator to wake
            self._scheduled.clear()

    def _wake(self) -> None:
        self._scheduled.clear()
        numbers = self._client.take_ready().tolist()
        for number in self._news if self._client.error is not None else numbers:
            if number in self._news:
                self._news[number].set()


Prepared = TypeVar("Prepared")

#: Texts above this many characters are tokenized on a thread: they would block the loop for more than a millisecond.
_LONG_TEXT_CHARS = 4096


class AsyncLLM(AbsentMethods):
    """An engine with an asynchronous interface; arguments and errors are those of LLM.

    The constructor blocks until the engine is ready; `await AsyncLLM.create(...)` does not block the loop. The object
    is bound to the event loop of its first generate() until that is closed. Loops of asyncio and of uvloop both work.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        connect: str | Sequence[str] | None = None,
        route: str | None = None,
        seed: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        start_timeout: float = 300.0,
        connect_timeout: float = 10.0,
        restart_engine: bool = True,
        client_name: str = "",
        **options: Any,
    ) -> None:
        self._engine = EngineHandle(
            model,
            connect=connect,
            route=route,
            seed=seed,
            tokenizer=tokenizer,
            skip_tokenizer=skip_tokenizer_init,
            start_timeout=start_timeout,
            connect_timeout=connect_timeout,
            restart=restart_engine,
            client_name=client_name,
            options=options,
        )
        self._waker: Waker | None = None
        self._numbers: dict[str, int | None] = {}  # by name of live requests; None during tokenization
        self._num_unnamed = 0
        self._finalizer = weakref.finalize(self, self._engine.close)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine.describe()})"

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: object) -> Self:
        """Return an AsyncLLM with these arguments. others: vLLM's, for its logging. Errors: the constructor's."""
        return cls(**arguments_of(engine_args))

    @classmethod
    async def create(cls, model: str | os.PathLike[str] | None = None, **arguments: Any) -> Self:
        """Construct an AsyncLLM on a thread, without blocking the loop. Arguments: the constructor's."""
        return await asyncio.to_thread(cls, model, **arguments)

    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str = "",
        pins: Sequence[Pin] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one request, as sampling_params.output_kind states; the last one is finished.

        Arguments: those of LLM.generate(), for one prompt. request_id: a name unique among live requests; None = a
        number. deadline: seconds in which the request must finish, counted from the first request for an output. A slow
        consumer gets merged outputs. Closing the iterator, or cancelling its task, aborts the request. Errors, raised
        by the iterator: InvalidRequestError, also for a request_id in use; RequestFailedError; DeadlineExceededError;
        EngineDeadError.
        """
        check_neutral(tokenization_kwargs=tokenization_kwargs)
        options = {"add_special_tokens": True, "lora": lora_request, "pins": pins}
        begin = self._generating(prompt, sampling_params, priority, deadline, tenant, **options)
        return self._serve(begin, request_id)

    def chat(
        self,
        messages: list[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        deadline: float | None = None,
        tenant: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one conversation, a list of {"role", "content"}; see generate()."""
        check_neutral(chat_template_content_format=chat_template_content_format)
        (prompt,) = self._engine.render_chats(
            [messages],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=chat_template_kwargs,
        )
        options = {"add_special_tokens": False, "lora": lora_request}
        begin = self._generating(prompt, sampling_params, priority, deadline, tenant, **options)
        return self._serve(begin, request_id)

    async def beam_search(
        self,
        prompt: PromptInput,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str = "",
    ) -> BeamSearchOutput:
        """Return the most likely outputs of one prompt; see LLM.beam_search(). Errors: those of generate()."""
        options = {"lora_request": lora_request, "priority": priority, "deadline": deadline, "tenant": tenant}
        async for output in self.generate(prompt, sampling_params(params), request_id, **options):  # type: ignore[arg-type]
            last = output  # only one: a search outputs nothing before its end
        tokenizer = self._engine.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(last.prompt_token_ids)
        return beam_search_output(last, params, text)

    def encode(
        self,
        prompt: PromptInput,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str = "",
        prompt_name: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the answer to one pooling request, once, as in vLLM's interface. Arguments: those of LLM.encode().

        Errors, raised by the iterator: those of generate().
        """

        async def begin(name: str) -> State[PoolingRequestOutput]:
            prepare = partial(
                prepare_pooling,
                priority=priority,
                deadline=deadline,
                tenant=tenant,
                prompt_name=prompt_name,
                lora=lora_request,
            )
            if lora_request is not None:
                (prepared,) = await asyncio.to_thread(
                    prepare, self._engine, [_one_prompt(prompt)], pooling_params, pooling_task
                )
            else:
                (prepared,) = await _beside_the_loop(
                    prompt, prepare, self._engine, [_one_prompt(prompt)], pooling_params, pooling_task
                )
            return submit_pooling(self._engine, prepared, name)

        return self._serve(begin, request_id)

    async def embed_chats(
        self,
        messages: list[Message],
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **arguments: Any,
    ) -> AsyncGenerator[EmbeddingRequestOutput, None]:
        """Yield the embedding of one conversation, perhaps with images, once. arguments: those of LLM.embed_chats().

        Errors, raised by the iterator: those of generate().
        """

        async def begin(name: str) -> State[PoolingRequestOutput]:
            prepare = partial(prepare_chats, lora=lora_request, **arguments)
            # on a thread: a template is rendered, and images are read
            (prepared,) = await asyncio.to_thread(prepare, self._engine, [messages], pooling_params)
            return submit_pooling(self._engine, prepared, name)

        async with contextlib.aclosing(self._serve(begin, request_id)) as outputs:
            async for output in outputs:
                yield embedding_of(output)

    async def pins(self, tenant: str = "") -> PinList:
        """Return a tenant's pins, as LLM.pins() does."""
        return await asyncio.to_thread(self._engine.client.pins, tenant)

    async def release_pin(self, name: str, tenant: str = "") -> None:
        """End a named pin, as LLM.release_pin() does."""
        await asyncio.to_thread(self._engine.client.release_pin, name, tenant)

    async def fork_pin(self, name: str, new_name: str, ttl_ms: int, tenant: str = "") -> None:
        """Pin what a named pin has under another name too, as LLM.fork_pin() does."""
        await asyncio.to_thread(self._engine.client.fork_pin, name, new_name, ttl_ms, tenant)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Stop these requests; their iterators end with finish_reason "abort". Unknown names are ignored."""
        names = [request_id] if isinstance(request_id, str) else request_id
        numbers = [self._numbers.get(name) for name in names]
        self._engine.client.abort([number for number in numbers if number is not None])

    def receipt(self, output: Answer, key: str | os.PathLike[str] | None = None) -> Receipt:
        """Return the receipt of a finished output, as LLM.receipt() does."""
        return self._engine.receipt(output, key)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model recommends; see LLM.get_default_sampling_params()."""
        return self._engine.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Errors: InvalidRequestError if there is none."""
        return self._engine.need_tokenizer()

    @property
    def errored(self) -> bool:
        """Return whether the session has ended, so that every call would fail."""
        return self._engine.client.error is not None

    @property
    def is_running(self) -> bool:
        """Return whether the session is open."""
        return not self.errored

    @property
    def dead_error(self) -> EngineCoreError:
        """Return the error that ended the session; one without a reason if there was none."""
        return self._engine.client.error or EngineDeadError("the engine is gone")

    async def get_model_config(self) -> ModelDescription:
        """Return the engine's model configuration, under vLLM's names. Errors: CallFailedError, EngineDeadError."""
        return describe_model(await asyncio.to_thread(self._engine.client.model_information))

    @property
    def client(self) -> EngineClient:
        """Return the session's client: statistics, explain, KV events; owner only: pause, resume and drain."""
        return self._engine.client

    @property
    def numerics(self) -> str:
        """Return the numerics level of the engine: "L2", or the level that this machine and model allow."""
        return self._engine.client.welcome.numerics

    async def check_health(self, timeout: float = 10.0) -> None:
        """Check that the engine answers, between two steps, within `timeout` seconds.

        A live process that runs no steps is not healthy. Errors: EngineDeadError, CallFailedError.
        """
        await asyncio.to_thread(self._engine.client.statistics, timeout)

    async def statistics(self) -> Statistics:
        """Return the engine's counters and gauges over all clients. Errors: CallFailedError, EngineDeadError."""
        return await asyncio.to_thread(self._engine.client.statistics)

    async def update_weights(
        self, weights: WeightsInput, mode: UpdateModeName = "wait", timeout: float | None = None
    ) -> WeightsMark:
        """Give the running model other weights, as LLM.update_weights() does."""
        return await asyncio.to_thread(update_weights, self._engine.client, weights, mode, timeout)

    async def sleep(self, level: int = 1) -> None:
        """Free memory until wake_up(), as LLM.sleep() does."""
        await asyncio.to_thread(self._engine.client.sleep, level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Run requests again after sleep(), as LLM.wake_up() does."""
        await asyncio.to_thread(wake_up, self._engine.client, tags)

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps. Errors: CallFailedError, EngineDeadError."""
        return (await self.statistics()).sleep_level > 0

    async def reset_prefix_cache(self) -> None:
        """Drop all cached blocks that no running request holds. Errors: CallFailedError, EngineDeadError."""
        await asyncio.to_thread(self._engine.client.reset_prefix_cache)

    async def kv_events(self) -> AsyncGenerator[KVEvents, None]:
        """Yield the content of the engine's prefix cache, then every change; see frontend/client/kv_event_stream.py.

        A new stream closes the previous one. Errors: CallFailedError, EngineDeadError.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        stream = await asyncio.to_thread(self._engine.client.follow_kv_events)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.set)

        stream.set_listener(wake)
        try:
            while stream.is_open:
                news.clear()
                message = await asyncio.to_thread(stream.get, 0) if stream.is_broken else stream.get(0)
                if message is not None:
                    yield message
                else:
                    await news.wait()
        finally:
            await asyncio.to_thread(stream.close)

    def shutdown(self) -> None:
        """End the session, and stop the engine if this object started it. A second call does nothing.

        Open iterators raise EngineDeadError.
        """
        self._finalizer()

    def close(self) -> None:
        """Call shutdown()."""
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _serve(
        self, begin: Callable[[str], Awaitable[State[Output]]], request_id: str | None
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of one request. begin: submits it under its name."""
        waker = self._bind()
        name = self._claim(request_id)
        client = self._engine.client
        number: int | None = None
        try:
            state = await begin(name)
            number = self._numbers[name] = state.number
            news = waker.register(number)
            while not state.finished:
                output = self._engine.advance(state)
                if output is not None:
                    yield output
                elif client.error is not None:
                    client.raise_if_ended()
                else:
                    await news.wait()
                news.clear()
        finally:
            del self._numbers[name]
            if number is not None:
                waker.forget(number)
                client.discard([number])

    def _generating(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        priority: int,
        deadline: float | None,
        tenant: str,
        **options: Any,
    ) -> Callable[[str], Awaitable[State[RequestOutput]]]:
        """Return the function that submits a request for tokens under a name. options: further ones of
        EngineHandle.prepare.
        """

        async def begin(name: str) -> State[RequestOutput]:
            prepare = partial(self._engine.prepare, tenant=tenant, **options)
            if options["lora"] is not None:  # the engine may have to load it, which is waited for
                (prepared,) = await asyncio.to_thread(prepare, [_one_prompt(prompt)], params, priority, deadline)
            else:
                (prepared,) = await _beside_the_loop(prompt, prepare, [_one_prompt(prompt)], params, priority, deadline)
            return self._engine.submit(prepared, name)

        return begin

    def _bind(self) -> Waker:
        loop = asyncio.get_running_loop()
        if self._waker is None:
            self._waker = Waker(self._engine.client, loop)
        if self._waker.loop is not loop:
            if not self._waker.loop.is_closed():
                raise EngineCoreError("this AsyncLLM is bound to another event loop that is open; make one per loop")
            self._waker.move(loop)
        return self._waker

    def _claim(self, request_id: str | None) -> str:
        """Add the request's name to the live ones and return it. Errors: InvalidRequestError for a name in use."""
        name = request_id
        while name is None or (request_id is None and name in self._numbers):
            name = str(self._num_unnamed)
            self._num_unnamed += 1
        if not isinstance(name, str):
            raise InvalidRequestError(f"request_id must be a str, got {type(name).__name__}")
        if name in self._numbers:
            raise InvalidRequestError(f"request_id {name!r} is in use by a live request; use another, or leave it out")
        self._numbers[name] = None
        return name


def _one_prompt(prompt: PromptInput) -> PromptInput:
    """Return the prompt. Errors: InvalidRequestError for several."""
    prompts = split_prompts(prompt)
    if len(prompts) != 1:
        raise InvalidRequestError(f"AsyncLLM takes one prompt at a time; got {len(prompts)}")
    return prompts[0]


async def _beside_the_loop(prompt: PromptInput, prepare: Callable[..., Prepared], *arguments: Any) -> Prepared:
    """Return prepare(*arguments); for a long text it runs on a thread."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if isinstance(text, str) and len(text) > _LONG_TEXT_CHARS:
        return await asyncio.to_thread(prepare, *arguments)
    return prepare(*arguments)
