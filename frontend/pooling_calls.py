"""PoolingCalls: the calls of LLM whose answers are vectors: encode, embed, classify and score."""

from collections.abc import Callable, Sequence
from typing import Any

from frontend.lora import LoRAInput
from frontend.offline_run import run_all
from frontend.pooling import pair_prompt, prepare_pooling, scored_pairs
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
from frontend.session import EngineHandle
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import split_prompts
from ipc.errors import InvalidRequestError
from ipc.params.pooling_params import PoolingParams, PoolingTask


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
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        *,
        template: str | None = None,
        **arguments: Any,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts fit: one with each of the others, or each with the one at its position.

        A classifier with one label (a reranker) reads a pair as one prompt: by template, a text with {query} and
        {document}, or joined by its tokenizer. A model that embeds gives the cosine of two embeddings. arguments:
        further ones of encode(). Errors: those of encode(); InvalidRequestError for a classifier with several labels.
        """
        pairs, tasks = scored_pairs(data_1, data_2), self._engine.client.welcome.tasks
        if "embed" in tasks:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            found = dict(zip(texts, self.encode(texts, pooling_params, use_tqdm, **arguments), strict=True))
            return [cosine_score(found[one], found[other]) for one, other in pairs]
        if tasks.get("classify", 1) != 1:
            raise InvalidRequestError(f"score() needs a classifier with one label; this one has {tasks['classify']}")
        prompts = [pair_prompt(self._engine, pair, template) for pair in pairs]
        outputs = self.encode(prompts, pooling_params, use_tqdm, pooling_task="classify", **arguments)
        return [score_of(output) for output in outputs]
