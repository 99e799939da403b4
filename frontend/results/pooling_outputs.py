"""The results of LLM.encode(), embed(), classify() and score(), in vLLM's form."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from ipc.params.pooling_params import PoolingParams
from ipc.tables.arrays import Floats
from ipc.wire.lora_messages import AdapterId
from ipc.wire.placed_feature import PlacedFeature


class SubmittedPooling(NamedTuple):
    """What the engine was sent with the prompt's tokens, for receipts."""

    params: PoolingParams
    second_from: int
    adapter: AdapterId | None
    features: Sequence[PlacedFeature] = ()


@dataclass(slots=True)
class PoolingOutput:
    """data: float32 [width], or [tokens, width] for a task of each token."""

    data: Floats


@dataclass(slots=True)
class PoolingRequestOutput:
    """The answer to one prompt from encode()."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    submitted: SubmittedPooling | None = None

    @property
    def vectors(self) -> Floats:
        """Return the numbers of the answer as the engine gave them, [n, width]."""
        return np.atleast_2d(self.outputs.data)


@dataclass(slots=True)
class EmbeddingOutput:
    """embedding: numbers [width]."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    submitted: SubmittedPooling | None = None

    @property
    def vectors(self) -> Floats:
        """Return the numbers of the answer as the engine gave them, [n, width]."""
        return np.array([self.outputs.embedding], np.float32)


@dataclass(slots=True)
class ClassificationOutput:
    """probs: a probability for each label, or the result of the model's own activation."""

    probs: list[float]


@dataclass(slots=True)
class ClassificationRequestOutput:
    """The classification of one prompt."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    submitted: SubmittedPooling | None = None

    @property
    def vectors(self) -> Floats:
        """Return the numbers of the answer as the engine gave them, [n, width]."""
        return np.array([self.outputs.probs], np.float32)


@dataclass(slots=True)
class ScoringOutput:
    """score: how well a pair of texts fits."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The score of one pair of texts. prompt_token_ids: of the pair, or of both texts in order."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finished: bool = True
    submitted: SubmittedPooling | None = None  # None: the score is of two answers

    @property
    def vectors(self) -> Floats:
        """Return the numbers of the answer as the engine gave them, [n, width]."""
        return np.array([[self.outputs.score]], np.float32)


PooledAnswer: TypeAlias = (
    PoolingRequestOutput | EmbeddingRequestOutput | ClassificationRequestOutput | ScoringRequestOutput
)


def embedding_of(output: PoolingRequestOutput) -> EmbeddingRequestOutput:
    """Return the answer as an embedding."""
    found = EmbeddingOutput(output.outputs.data.tolist())
    return EmbeddingRequestOutput(
        output.request_id, found, output.prompt_token_ids, output.num_cached_tokens, submitted=output.submitted
    )


def classification_of(output: PoolingRequestOutput) -> ClassificationRequestOutput:
    """Return the answer as a classification."""
    found = ClassificationOutput(output.outputs.data.tolist())
    return ClassificationRequestOutput(
        output.request_id, found, output.prompt_token_ids, output.num_cached_tokens, submitted=output.submitted
    )


def score_of(output: PoolingRequestOutput) -> ScoringRequestOutput:
    """Return the answer of a classifier with one label as a score."""
    found = ScoringOutput(float(output.outputs.data[0]))
    return ScoringRequestOutput(
        output.request_id, found, output.prompt_token_ids, output.num_cached_tokens, submitted=output.submitted
    )


def cosine_score(one: PoolingRequestOutput, other: PoolingRequestOutput) -> ScoringRequestOutput:
    """Return the cosine of the angle between two embeddings, with float64 sums, from -1 to 1."""
    a, b = (each.outputs.data.astype(np.float64) for each in (one, other))
    norms = float(np.sqrt((a * a).sum()) * np.sqrt((b * b).sum()))
    cosine = float((a * b).sum()) / norms if norms else 0.0
    found = ScoringOutput(max(-1.0, min(1.0, cosine)))
    name, ids = f"{one.request_id}_{other.request_id}", one.prompt_token_ids + other.prompt_token_ids
    return ScoringRequestOutput(name, found, ids, one.num_cached_tokens + other.num_cached_tokens)
