"""LLM: the offline interface. It takes prompts and returns finished RequestOutputs in the prompts' order."""

import os
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self, overload

from frontend.absent_methods import AbsentMethods
from frontend.call_arguments import check_neutral
from frontend.client.client import EngineClient
from frontend.engine_args import EngineArgs, arguments_of
from frontend.llm_engine import Counter, Gauge, LLMEngine, Vector
from frontend.lora import LoRAInput
from frontend.offline_run import run_all, without_too_long
from frontend.pooling import ScoredSide, pair_prompt, prepare_chats, prepare_pooling, scored_pairs, texts_to_embed
from frontend.receipts import Answer
from frontend.results.beam_search import BeamSearchOutput, beam_search_output, sampling_params
from frontend.results.outputs import RequestOutput
from frontend.results.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classification_of,
    cosine_score,
    embedding_of,
    score_of,
)
from frontend.session import EngineHandle, Message
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import split_prompts
from frontend.text.tokenizer import Tokenizer
from frontend.weights import WeightMethods
from ipc.errors import EngineCoreError, InvalidRequestError
from ipc.params.beam_search import BeamSearchParams
from ipc.params.pooling_params import PoolingParams, PoolingTask
from ipc.params.sampling_params import SamplingParams
from ipc.records.receipt import Receipt
from ipc.wire.messages import Statistics
from ipc.wire.pin_messages import Pin, PinList

# PoolingCalls: the calls of LLM whose answers are vectors: encode, embed, classify and score.


class PoolingCalls:
    """Calls with vLLM's names. The owner has an EngineHandle."""

    _engine: EngineHandle

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRAInput = None,
        priority: int | Sequence[int] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        deadline: float | None = None,
        tenant: str = "",
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Pool one prompt or many; return the outputs in the prompts' order, their data as NumPy arrays of float32.

        pooling_task: "embed", "classify", or "token_embed" and "token_classify" for a vector of each token; None = the
        model's default. prompt_name: name of the instruction before each text to embed, in the model's
        config_sentence_transformers.json; None = its default, "" = none. The other arguments and errors are those of
        generate().
        """
        prepared = prepare_pooling(
            self._engine,
            split_prompts(prompts),
            pooling_params,
            pooling_task,
            priority=priority,
            deadline=deadline,
            tenant=tenant,
            prompt_name=prompt_name,
            lora=lora_request,
        )
        outputs: list[PoolingRequestOutput] = run_all(self._engine, prepared, use_tqdm)
        return outputs

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **arguments: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding for each prompt. At numerics level L2 it depends on its prompt alone, bit for bit.

        arguments: further ones of encode().
        """
        outputs = self.encode(prompts, pooling_params, use_tqdm, pooling_task="embed", **arguments)
        return [embedding_of(output) for output in outputs]

    def embed_chats(
        self,
        conversations: list[Message] | Sequence[list[Message]],
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRAInput = None,
        **arguments: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding for each chat, perhaps with images: one conversation or many, as in chat().

        arguments: further ones of prepare_chats(): chat_template, add_generation_prompt, prompt_name and those of
        requests. Over HTTP these are the `messages` of /v1/embeddings. Errors: those of embed() and chat().
        """
        chats = split_conversations(conversations)
        prepared = prepare_chats(self._engine, chats, pooling_params, lora=lora_request, **arguments)
        outputs: list[PoolingRequestOutput] = run_all(self._engine, prepared, use_tqdm)
        return [embedding_of(output) for output in outputs]

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **arguments: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the model's labels for each prompt. arguments: further ones of encode()."""
        outputs = self.encode(prompts, pooling_params, use_tqdm, pooling_task="classify", **arguments)
        return [classification_of(output) for output in outputs]

    def score(
        self,
        data_1: ScoredSide | Sequence[ScoredSide],
        data_2: ScoredSide | Sequence[ScoredSide],
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        *,
        template: str | None = None,
        instruction: str | None = None,
        lora_request: LoRAInput = None,
        **arguments: Any,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts fit: one with each of the others, or each with the one at its position.

        A classifier with one label (a reranker) reads a pair as one prompt: by template, a text with {query} and
        {document}; by its chat template, if one names these roles, with an instruction; or joined by its tokenizer. In
        a chat template a side may be {"content": [...]}, the parts of a message, with images. A model that embeds gives
        the cosine of two embeddings. arguments: further ones of encode(). Errors: those of encode();
        InvalidRequestError for a classifier with several labels.
        """
        pairs, tasks = scored_pairs(data_1, data_2), self._engine.client.welcome.tasks
        if "embed" in tasks:
            texts = texts_to_embed(pairs, instruction)
            arguments["lora_request"] = lora_request
            found = dict(zip(texts, self.encode(texts, pooling_params, use_tqdm, **arguments), strict=True))
            return [cosine_score(found[str(one)], found[str(other)]) for one, other in pairs]
        if tasks.get("classify", 1) != 1:
            raise InvalidRequestError(f"score() needs a classifier with one label; this one has {tasks['classify']}")
        prompts = [pair_prompt(self._engine, pair, template, instruction) for pair in pairs]
        special = template is not None  # otherwise a pair has them, in ids or by a chat template
        prepared = prepare_pooling(
            self._engine,
            prompts,
            pooling_params,
            "classify",
            add_special_tokens=special,
            lora=lora_request,
            **arguments,
        )
        outputs: list[PoolingRequestOutput] = run_all(self._engine, prepared, use_tqdm)
        return [score_of(output) for output in outputs]


class LLM(PoolingCalls, WeightMethods, AbsentMethods):
    """An engine with a synchronous interface, which is vLLM's.

    model: folder with config.json and safetensors files, or a .gguf file; None = the demo model. connect: address of a
    running engine, instead of a model, or a list of several: then route chooses among them (prefix, least_loaded,
    round_robin; docs/scale_out.md), and without it the next one serves if one is lost. seed: seed of requests without
    one of their own; None = 0, and with connect= a number of the session. tokenizer: path of the tokenizer files,
    instead of the model's;
    skip_tokenizer_init: use token ids only. start_timeout: seconds in which the engine must start; connect_timeout:
    seconds in which it must answer. restart_engine: whether an engine that dies is restarted; its requests then
    continue exactly (docs/operations.md). client_name: this client's name in the engine (for client_weights). options:
    those of EngineConfig. The session ends with close(), at the end of a `with` block, or when the object is collected.
    Errors: ConfigError, ModelFileError, EngineStartError, EngineDeadError, HandshakeError.
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
        self._finalizer = weakref.finalize(self, self._engine.close)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an LLM with these arguments. Errors: those of the constructor."""
        return cls(**arguments_of(engine_args))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine.describe()})"

    @overload
    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRAInput = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: None = None,
        *,
        deadline: float | None = None,
        tenant: str = "",
        pins: Sequence[Pin] = (),
        return_exceptions: Literal[False] = False,
        ignore_too_long: bool = False,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRAInput = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: None = None,
        *,
        deadline: float | None = None,
        tenant: str = "",
        pins: Sequence[Pin] = (),
        return_exceptions: Literal[True],
        ignore_too_long: bool = False,
    ) -> list[RequestOutput | EngineCoreError]: ...

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRAInput = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: None = None,
        *,
        deadline: float | None = None,
        tenant: str = "",
        pins: Sequence[Pin] = (),
        return_exceptions: bool = False,
        ignore_too_long: bool = False,
    ) -> list[RequestOutput] | list[RequestOutput | EngineCoreError]:
        """Complete one prompt or many; return the outputs in the prompts' order.

        A prompt is a str, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...], "cache_salt": ...}.
        sampling_params: one for all, or one per prompt; None = get_default_sampling_params(). priority: a smaller one
        runs sooner, if the scheduling policy uses priorities (fcfs does not). deadline: seconds from now in which every
        request must finish. tenant: the user that they belong to, if this program sends for several: each tenant has
        its own share (policy fair), its own bounds and its own prefix cache. use_tqdm: whether to show progress, or a
        class such as tqdm. return_exceptions: return the error of a failed prompt in its place, also for one
        that is too long or empty, instead of raising one. ignore_too_long: return an output without tokens, whose
        finish_reason is "ignored", for each prompt that is too long. lora_request: the adapter of all or of each
        (docs/lora.md). pins: what the engine should keep of each prompt (docs/pins.md); with several prompts, pins
        without names. tokenization_kwargs: vLLM's argument, None only. A prompt that the engine refuses for lack of
        room is sent again, until the deadline.
        Errors: InvalidRequestError before anything is submitted; RequestFailedError at the
        end if the engine failed a request, DeadlineExceededError if the deadline was the reason; EngineDeadError at
        once. The last three have the finished outputs in `outputs`.
        """
        check_neutral(tokenization_kwargs=tokenization_kwargs)
        self._use_pushed_weights()
        given = split_prompts(prompts)
        prepare = self._engine.prepare_each if return_exceptions or ignore_too_long else self._engine.prepare
        options: dict[str, Any] = {"tenant": tenant, "lora": lora_request, "pins": pins}
        prepared: list[Any] = [*prepare(given, sampling_params, priority, deadline, **options)]
        if ignore_too_long:
            prepared = without_too_long(given, prepared, keeps_errors=return_exceptions)
        return run_all(self._engine, prepared, use_tqdm, return_exceptions=return_exceptions)

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRAInput = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        deadline: float | None = None,
        tenant: str = "",
        pins: Sequence[Pin] = (),
    ) -> list[RequestOutput]:
        """Complete one conversation or many, each a list of {"role", "content"}.

        frontend/text/chat_messages.py describes messages, including tool calls. The other arguments, the result and
        the errors are those of generate().
        """
        check_neutral(chat_template_content_format=chat_template_content_format)
        conversations = split_conversations(messages)
        rendered = self._engine.render_chats(
            conversations,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=chat_template_kwargs,
        )
        prepared = self._engine.prepare(
            rendered,
            sampling_params,
            priority,
            deadline=deadline,
            tenant=tenant,
            add_special_tokens=False,
            lora=lora_request,
            pins=pins,
        )
        return run_all(self._engine, prepared, use_tqdm)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        lora_request: LoRAInput = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the most likely outputs of one prompt or many by beam search, with transformers' rules.

        The beams of all prompts run in the engine's batch, together with other requests. concurrency_limit: vLLM's
        argument, without effect: the engine decides how many run. The other arguments and the errors are those of
        generate().
        """
        prepared = self._engine.prepare(split_prompts(prompts), sampling_params(params), lora=lora_request)
        outputs = run_all(self._engine, prepared, use_tqdm, return_exceptions=False)
        tokenizer = self._engine.tokenizer
        texts = ["" if tokenizer is None else tokenizer.decode(output.prompt_token_ids) for output in outputs]
        return [beam_search_output(output, params, text) for output, text in zip(outputs, texts, strict=True)]

    def receipt(self, output: Answer, key: str | os.PathLike[str] | None = None) -> Receipt:
        """Return the receipt of a finished output of this engine, with which others can compute it again.

        output: of tokens, of vectors or of a score. key: file of the private key that signs it (`engine-core keys
        receipts`); None = it is not signed. See docs/receipts.md. Errors: InvalidRequestError for an output that can
        have none; ConfigError for the key.
        """
        return self._engine.receipt(output, key)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's generation_config.json or GGUF file recommends, as vLLM does.

        These are repetition_penalty, temperature, top_k, top_p, min_p, max_tokens and those of XTC. With the option
        generation_config="vllm" the result is SamplingParams().
        """
        return self._engine.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Errors: InvalidRequestError if there is none."""
        return self._engine.need_tokenizer()

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """Return the same engine, step by step: vLLM's interface below LLM."""
        return LLMEngine(self._engine)

    def get_metrics(self) -> list[Gauge | Counter | Vector]:
        """Return the engine's counters and gauges over all clients. Errors: CallFailedError, EngineDeadError."""
        return self.llm_engine.get_metrics()

    @property
    def client(self) -> EngineClient:
        """Return the session's client: statistics, explain, KV events; owner only: pause, resume and drain."""
        return self._engine.client

    @property
    def numerics(self) -> str:
        """Return the numerics level of the engine: "L2", or the level that this machine and model allow."""
        return self._engine.client.welcome.numerics

    def statistics(self) -> Statistics:
        """Return the engine's counters and gauges over all clients. Errors: CallFailedError, EngineDeadError."""
        return self._engine.client.statistics()

    def reset_prefix_cache(self) -> None:
        """Drop all cached blocks that no running request holds. Errors: CallFailedError, EngineDeadError.

        Weights that a program for vLLM has pushed (docs/vllm.md) are used from then on.
        """
        self._use_pushed_weights()
        self._engine.client.reset_prefix_cache()

    def pins(self, tenant: str = "") -> PinList:
        """Return a tenant's pins, and how much it may pin (docs/pins.md). Errors: CallFailedError, EngineDeadError."""
        return self._engine.client.pins(tenant)

    def release_pin(self, name: str, tenant: str = "") -> None:
        """End a named pin. Errors: CallFailedError, also if there is none; EngineDeadError."""
        self._engine.client.release_pin(name, tenant)

    def fork_pin(self, name: str, new_name: str, ttl_ms: int, tenant: str = "") -> None:
        """Pin what a named pin has under another name too. Errors: those of release_pin(), also for lack of room."""
        self._engine.client.fork_pin(name, new_name, ttl_ms, tenant)

    def _use_pushed_weights(self) -> None:
        if "llm_engine" in self.__dict__:
            self.llm_engine.pushed.flush()

    def close(self) -> None:
        """End the session, and stop the engine if this object started it. A second call does nothing."""
        self._finalizer()

    def shutdown(self) -> None:
        """Call close(), under vLLM's name for it."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def split_conversations(messages: list[Message] | Sequence[list[Message]]) -> list[list[Message]]:
    """Return one conversation or many as a list of conversations. Errors: InvalidRequestError for anything else."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError('a chat is a list of {"role": ..., "content": ...}, or a list of such lists')
    return [messages] if isinstance(messages[0], dict) else list(messages)  # type: ignore[list-item,arg-type]
