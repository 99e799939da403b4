"""/v1/score and /v1/rerank: how well texts fit a query, in vLLM's and in Jina's and Cohere's form."""

from collections.abc import Mapping
from typing import Any

import msgspec

from frontend.http.errors import HttpError
from frontend.http.pooling import MAX_TEXTS, PoolingCall, check_pooling, list_head, pool, receipts_of
from frontend.http.replies.answer_format import json_bytes
from frontend.http.request import Request, Response, new_id
from frontend.http.service import Service
from frontend.pooling import pair_prompt, scored_pairs
from frontend.results.pooling_outputs import PoolingRequestOutput, ScoringRequestOutput, cosine_score, score_of
from frontend.text.prompt_forms import PromptInput
from ipc.params.pooling_params import PoolingParams


class ScoreBody(msgspec.Struct, kw_only=True):
    """The body of /v1/score: one text with each of the others, or each with the one at its position."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    template: str | None = None  # see LLM.score()
    priority: int | None = None
    instruction: str | None = None  # for the model's chat template
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None  # whether a classifier's score is a probability; None = as its files say
    receipt: bool | None = None  # docs/receipts.md

    # Refused by name.
    max_tokens_per_doc: Any = None
    max_tokens_per_query: Any = None
    truncation_side: Any = None


class RerankBody(msgspec.Struct, kw_only=True):
    """The body of /v1/rerank."""

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    template: str | None = None
    priority: int | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    receipt: bool | None = None

    # Refused by name.
    max_tokens_per_doc: Any = None
    max_tokens_per_query: Any = None
    truncation_side: Any = None
    rank_fields: Any = None


_INSTEAD = {
    "max_tokens_per_doc": "use truncate_prompt_tokens",
    "max_tokens_per_query": "use truncate_prompt_tokens",
    "truncation_side": "truncate_prompt_tokens keeps the tokens at the prompt's end",
    "rank_fields": "send each document's text",
}
_FEW_CHARS = 1 << 14  # most characters of pairs that are read in the event loop
_score_decoder = msgspec.json.Decoder(ScoreBody)
_rerank_decoder = msgspec.json.Decoder(RerankBody)


async def create_score(service: Service, request: Request) -> Response:
    """Score pairs of texts."""
    body = request.decode(_score_decoder)
    name = service.check_model(request, body.model)
    scores, outputs = await _scores(service, request, body, _pairs(body.text_1, body.text_2))
    data = [{"index": index, "object": "score", "score": one.outputs.score} for index, one in enumerate(scores)]
    fields = {**list_head("score", name), "data": data, "usage": _usage(scores)}
    return await _answer(service, request, body, fields, outputs)


async def rerank(service: Service, request: Request) -> Response:
    """Return documents in order of their scores, best first."""
    body = request.decode(_rerank_decoder)
    name = service.check_model(request, body.model)
    texts = [one if isinstance(one, str) else one.get("text") for one in body.documents]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise HttpError(400, "documents must be texts, or objects with a text", param="documents")
    if body.top_n is not None and body.top_n < 0:
        raise HttpError(400, f"top_n must be at least 0, got {body.top_n}", param="top_n")
    scores, outputs = await _scores(service, request, body, _pairs(body.query, texts))
    order = sorted(range(len(texts)), key=lambda index: (-scores[index].outputs.score, index))
    results = [
        {"index": index, "relevance_score": scores[index].outputs.score}
        | ({} if body.return_documents is False else {"document": {"text": texts[index]}})
        for index in order[: body.top_n or None]
    ]
    fields = {"id": f"rerank-{new_id()}", "model": name, "usage": _usage(scores), "results": results}
    return await _answer(service, request, body, fields, outputs)


async def _answer(
    service: Service,
    request: Request,
    body: ScoreBody | RerankBody,
    fields: Mapping[str, object],
    outputs: list[PoolingRequestOutput],
) -> Response:
    def work() -> bytes:
        return json_bytes({**fields, **receipts_of(service, outputs, body.receipt)})

    return Response(await service.run(request, work, is_long=bool(body.receipt)))


def _pairs(first: object, second: object) -> list[tuple[str, str]]:
    """Return the pairs of texts to score. Errors: InvalidRequestError."""
    return [(str(one), str(other)) for one, other in scored_pairs(first, second)]


async def _scores(
    service: Service, request: Request, body: ScoreBody | RerankBody, pairs: list[tuple[str, str]]
) -> tuple[list[ScoringRequestOutput], list[PoolingRequestOutput]]:
    """Return the score of each pair, by a classifier with one label, or the cosine of two embeddings; and the engine's
    answers: one for each pair, or one for each different text.
    """
    tasks, priority = service.engine.client.welcome.tasks, body.priority or 0
    for name, instead in _INSTEAD.items():
        if getattr(body, name, None) not in (None, 0, ""):
            raise HttpError(400, f"{name} is not supported: {instead}", param=name)
    params = PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
    if tasks.get("classify", 1) != 1:
        raise HttpError(
            400, f"scores need a classifier with one label; this one has {tasks['classify']}", param="model"
        )
    if len(pairs) > MAX_TEXTS:
        raise HttpError(400, f"{len(pairs)} pairs in one request; at most {MAX_TEXTS} are allowed")
    if "classify" in tasks:
        params.use_activation = body.use_activation
        call = PoolingCall(params, "classify", priority, body.receipt)
        check_pooling(service, request, pairs, call)  # before they are read
        num_chars = _check_pairs(service, pairs, is_cut=body.truncate_prompt_tokens is not None)

        def prepare() -> list[PromptInput]:
            return [pair_prompt(service.engine, pair, body.template, body.instruction) for pair in pairs]

        prompts = await service.run(request, prepare, is_long=num_chars > _FEW_CHARS)
        outputs = await pool(service, request, prompts, call)
        return [score_of(one) for one in outputs], outputs
    if body.instruction:
        raise HttpError(400, "instruction is for rerankers: put it before the texts", param="instruction")
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    outputs = await pool(service, request, texts, PoolingCall(params, "embed", priority, body.receipt))
    found = dict(zip(texts, outputs, strict=True))
    return [cosine_score(found[one], found[other]) for one, other in pairs], outputs


def _check_pairs(service: Service, pairs: list[tuple[str, str]], *, is_cut: bool) -> int:
    """Check that pairs can be tokenized in a short time: a query is read once for each text. Return their characters.

    is_cut: prompts are truncated. Errors: HttpError 400, PromptTooLongError.
    """
    check = service.check_text if is_cut else service.check_countable
    for text in {text for pair in pairs for text in pair}:
        check(text)
    if (size := sum(len(first) + len(second) for first, second in pairs)) > service.options.max_body_bytes:
        text = f"the pairs have {size} characters, the query in each of them"
        raise HttpError(400, f"{text}; at most {service.options.max_body_bytes} are read: send several requests")
    return size


def _usage(scores: list[ScoringRequestOutput]) -> dict[str, int]:
    count = sum(len(one.prompt_token_ids) for one in scores)
    return {"prompt_tokens": count, "total_tokens": count}
