"""StageStreams: the layers of one pipeline stage of a model whose hidden states are in several streams (Gemma 3n)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from core.models.config import ModelConfig
from core.models.layers.streams import ModelStreams, build_streams
from core.models.operations.stored_matrix import Weight
from core.models.operations.stream_arithmetic import Streams
from core.models.operations.tensor import Tensor
from core.models.parts.stage import Stage
from core.models.parts.stage_llama import Passed, StageLlama
from core.models.parts.weight_parts import WeightParts
from core.models.step import ModelInputs, StepResult
from kernels.elements import Dtype

_NOTHING = Passed([], None, [])


class StageStreams(StageLlama):
    """A StageLlama whose layers run operation by operation. All streams are passed on."""

    streams: "_StreamsOfStage"

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, Weight]], dtype: Dtype, stage: Stage, **options: Any
    ) -> None:
        """Build the stage. Parameters and errors: see StageLlama."""
        assert config.streams is not None, config
        self._num_streams = config.streams.count
        super().__init__(config, weights, dtype, stage, **options)
        if not stage.is_first:
            self.embedding = self.streams.take_embeddings

    def _build_streams(self, parts: WeightParts) -> ModelStreams | None:
        is_first, is_last = self.stage.is_first, self.stage.is_last
        own = build_streams(self.operations, parts, self.config, has_first=is_first, has_last=is_last)
        assert own is not None, self.config
        return _StreamsOfStage(own.before, own.after, own.arithmetic, is_last=is_last)

    def _run(self, inputs: ModelInputs, passed: Passed | None) -> StepResult:
        self.streams.passed = passed
        return super(StageLlama, self).forward(inputs)

    def _left(self, result: StepResult, passed: Passed | None, num_tokens: int) -> Passed:
        return self.streams.left


@dataclass
class _StreamsOfStage(ModelStreams):
    """ModelStreams whose streams come from the stage before and go to the next one."""

    is_last: bool
    passed: Passed | None = None  # None: this is the first stage
    left: Passed = _NOTHING  # after the last step

    def take_embeddings(self, *_: Tensor) -> Tensor:
        """Return the embeddings of the step's tokens."""
        assert self.passed is not None, "the first stage makes them"
        return self.passed.embeddings

    def begin(self, hidden: Tensor) -> Streams:
        """Return the streams before the stage's first layer. hidden: embeddings."""
        self.left = Passed([], hidden, [])
        return super().begin(hidden) if self.passed is None else self.passed.hidden

    def end(self, streams: Streams) -> Tensor:
        """Return the model's output; or keep what the next stage gets, and return one of the streams."""
        if self.is_last:
            return super().end(streams)
        self.left = self.left._replace(hidden=streams)
        return streams[0]
