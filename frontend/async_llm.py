"""AsyncLLM: requests as async iterators, many at once on one event loop."""

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Iterable
from types import TracebackType
from typing import Any, Self

from frontend.call_arguments import check_neutral
from frontend.client.client import EngineClient
from frontend.results.outputs import RequestOutput
from frontend.session import EngineHandle, Message, PreparedRequest
from frontend.text.prompts import PromptInput, split_prompts
from frontend.text.tokenizer import Tokenizer
from ipc.errors import EngineCoreError, InvalidRequestError
from ipc.messages import Statistics
from ipc.sampling_params import SamplingParams
from ipc.scheduling_messages import KVEvents

#: Texts above this many characters are tokenized on a thread: it would hold up the loop for more than a millisecond.
_LONG_TEXT_CHARS = 4096


class AsyncLLM:
    """An engine and an asynchronous way to use it; arguments and errors are LLM's.

    The constructor waits for the engine; `await AsyncLLM.create(...)` does not hold up the loop. The loop of the first
    generate() is the only one it can be used from; asyncio's and uvloop's both do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        connect: str | None = None,
        seed: int | None = 0,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        start_timeout: float = 300.0,
        connect_timeout: float = 10.0,
        client_name: str = "",
        **options: Any,
    ) -> None:
        self._engine = EngineHandle(
            model,
            connect=connect,
            seed=seed,
            tokenizer=tokenizer,
            skip_tokenizer=skip_tokenizer_init,
            start_timeout=start_timeout,
            connect_timeout=connect_timeout,
            client_name=client_name,
            options=options,
        )
        self._waker: _Waker | None = None
        self._numbers: dict[str, int | None] = {}  # of live requests; None while the prompt is being tokenized
        self._num_unnamed = 0
        self._finalizer = weakref.finalize(self, self._engine.close)

    @classmethod
    async def create(cls, model: str | os.PathLike[str] | None = None, **arguments: Any) -> Self:
        """As the constructor, without holding up the loop."""
        return await asyncio.to_thread(cls, model, **arguments)

    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs as sampling_params.output_kind asks for them; the last one is finished.

        deadline: seconds, from when it is first asked for an output, until the request must have finished. A consumer
        that lags behind gets merged outputs. Closing the iterator, or cancelling its task, aborts the request. Errors,
        when it is asked for an output: InvalidRequestError, also for a request_id that is live; RequestFailedError;
        DeadlineExceededError; EngineDeadError.
        """
        check_neutral(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return self._generate(prompt, sampling_params, request_id, priority, deadline, add_special_tokens=True)

    def chat(
        self,
        messages: list[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As generate(), for one conversation: a list of {"role", "content"}."""
        check_neutral(
            lora_request=lora_request,
            chat_template_content_format=chat_template_content_format,
            continue_final_message=continue_final_message,
        )
        (prompt,) = self._engine.render_chats(
            [messages],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            kwargs=chat_template_kwargs,
        )
        return self._generate(prompt, sampling_params, request_id, priority, deadline, add_special_tokens=False)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Stop these requests; their iterators end with finish_reason "abort". Unknown ones are ignored."""
        names = [request_id] if isinstance(request_id, str) else request_id
        numbers = [self._numbers.get(name) for name in names]
        self._engine.client.abort([number for number in numbers if number is not None])

    async def get_default_sampling_params(self) -> SamplingParams:
        """As LLM's."""
        return self._engine.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """Errors: InvalidRequestError where there is none."""
        if self._engine.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer: it takes and gives token ids only")
        return self._engine.tokenizer

    @property
    def client(self) -> EngineClient:
        """The session's client: statistics, explain, KV events, and for the engine's owner pause, resume and drain."""
        return self._engine.client

    @property
    def numerics(self) -> str:
        """As LLM's."""
        return self._engine.client.welcome.numerics

    async def check_health(self, timeout: float = 10.0) -> None:
        """Returns if the engine answers, between two steps, within `timeout` seconds: a live process that does not
        step is not healthy. Errors: EngineDeadError, CallFailedError."""
        await asyncio.to_thread(self._engine.client.statistics, timeout)

    async def statistics(self) -> Statistics:
        """The engine's counters and gauges, of all its clients. Errors: CallFailedError, EngineDeadError."""
        return await asyncio.to_thread(self._engine.client.statistics)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached blocks no running request holds. Errors: CallFailedError, EngineDeadError."""
        await asyncio.to_thread(self._engine.client.reset_prefix_cache)

    async def kv_events(self) -> AsyncGenerator[KVEvents, None]:
        """What the engine's prefix cache holds, and every change, as frontend/client/kv_event_stream.py says; one at a
        time. Errors: CallFailedError, EngineDeadError."""
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
        """End the session and the engine it started; iterators raise EngineDeadError. Does nothing the second time."""
        self._finalizer()

    def close(self) -> None:
        """As shutdown()."""
        self.shutdown()

    def __repr__(self) -> str:
        return f"AsyncLLM({self._engine.describe()})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _generate(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        deadline: float | None,
        *,
        add_special_tokens: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        waker = self._bind()
        name = self._claim(request_id)
        client = self._engine.client
        number: int | None = None
        try:
            prepared = await self._prepare(prompt, params, priority, deadline, add_special_tokens)
            state = self._engine.submit(prepared, name)
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

    async def _prepare(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        priority: int,
        deadline: float | None,
        add_special_tokens: bool,
    ) -> PreparedRequest:
        prompts = split_prompts(prompt)
        if len(prompts) != 1:
            raise InvalidRequestError(f"AsyncLLM takes one prompt at a time; got {len(prompts)}")
        text = prompts[0].get("prompt") if isinstance(prompts[0], dict) else prompts[0]
        arguments = (prompts, params, priority, deadline)
        if isinstance(text, str) and len(text) > _LONG_TEXT_CHARS:
            prepare = self._engine.prepare
            return (await asyncio.to_thread(prepare, *arguments, add_special_tokens=add_special_tokens))[0]
        return self._engine.prepare(*arguments, add_special_tokens=add_special_tokens)[0]

    def _bind(self) -> "_Waker":
        loop = asyncio.get_running_loop()
        if self._waker is None:
            self._waker = _Waker(self._engine.client, loop)
        if self._waker.loop is not loop:
            raise EngineCoreError("this AsyncLLM is bound to the event loop of its first generate(); make one per loop")
        return self._waker

    def _claim(self, request_id: str | None) -> str:
        """Enter the request's name among the live ones."""
        name = request_id
        while name is None or (request_id is None and name in self._numbers):
            name = str(self._num_unnamed)
            self._num_unnamed += 1
        if not isinstance(name, str):
            raise InvalidRequestError(f"request_id must be a str, got {type(name).__name__}")
        if name in self._numbers:
            raise InvalidRequestError(f"request_id {name!r} is in use by a live request; take another, or leave it out")
        self._numbers[name] = None
        return name


class _Waker:
    """Carries the client's news to the event loop: one callback per received batch, however many requests it is for.

    The client holds it, so it must not hold the AsyncLLM: that could never be collected.
    """

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._client = client
        self._news: dict[int, asyncio.Event] = {}
        self._scheduled = threading.Event()
        client.add_listener(self._on_news)

    def register(self, number: int) -> asyncio.Event:
        """The event that is set when the request has news; called in the loop, before it can have any there."""
        event = self._news[number] = asyncio.Event()
        return event

    def forget(self, number: int) -> None:
        del self._news[number]

    def _on_news(self) -> None:
        """In the client's IO thread."""
        if self._scheduled.is_set():
            return
        self._scheduled.set()
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed, and with it all iterators
            return

    def _wake(self) -> None:
        self._scheduled.clear()
        numbers = self._client.take_ready().tolist()
        for number in self._news if self._client.error is not None else numbers:
            if number in self._news:
                self._news[number].set()
