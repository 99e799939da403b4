"""StageLlama: the layers of one pipeline stage, with embeddings in the first stage and the head in the last."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from core.models.config import ModelConfig
from core.models.layers.layer_kinds import windows
from core.models.llama import Llama, blocks_per_page
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.operations import Product
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.parts.stage import Stage
from core.models.parts.weight_parts import WeightParts
from core.models.step import Begun, ModelInputs, StepResult, TappedResult
from ipc.errors import ConfigError
from ipc.tables.arrays import NO_INTS, Floats, Ints
from kernels.elements import FLOAT32, Dtype, element_name


class StageLlama(Llama):
    """A part of a Llama. It needs the C kernels.

    The residual stream of a step's tokens is passed in as given embeddings (kernels/cpu/c/layers/embedding.h), and the
    last layer's output is passed on. If layers have inputs of their own, so are the tokens' embeddings.
    """

    _num_streams = 1  # of hidden states

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, Weight]], dtype: Dtype, stage: Stage, **options: Any
    ) -> None:
        """Build the stage. config: the whole model's. weights: those that the stage reads. options: see Llama.

        Errors: those of Llama; ConfigError for more stages than layers; ChannelEndedError.
        """
        self.stage = stage
        self._own, self._taps_of_model = stage.layers(config), _TapsOfModel((), ())
        super().__init__(stage.config(config), stage.renamed(config, weights), dtype, **options)
        assert isinstance(self.operations, CpuOperations), "a stage needs the C kernels"
        self.windows_of_model, self.num_blocks_per_page = windows(config), blocks_per_page(self.operations, config)
        self.state_size_of_model = config.state_size
        #: Whether steps come from the stage before and go to the next one. Steps that measure times do not.
        self.is_linked = False
        own = [f"{name}={variant}" for name, variant in super().first_variants.items()]
        kernels = f"{element_name(dtype)} {self.operations.variant}"
        first, *names = stage.link.pass_on([kernels, *own])
        if first != kernels:
            raise ConfigError(
                f"the stages' machines would not compute the same bits as one process: the first has {first}, this one "
                f"{kernels}: set --dtype and --cpu-kernels, such as avx2, so that they agree"
            )
        self._first_variants = dict(one.split("=", 1) for one in names)
        if not stage.is_last:
            self.tap(())

    def _build_begin(self, parts: WeightParts) -> Product | None:
        if self.stage.is_first and not (self.stage.is_last and self.config.tie_word_embeddings):
            self._build_embedding(parts, parts.take_matrix("model.embed_tokens.weight"), None)
            return None
        if self.stage.is_last and self.config.tie_word_embeddings:
            return super()._build_begin(parts)
        nothing = StoredMatrix.of(np.zeros((1, self.config.hidden_size), np.float32))
        self.embedding = self.operations.embedding(nothing, 1.0, None)
        return None

    def _build_end(self, parts: WeightParts, head: Product | None) -> None:
        if self.stage.is_last:
            super()._build_end(parts, head)
            return
        self._norm = self.operations.norm(None, self.config.rms_norm_eps, self.dtype)
        self._float_norm = self.operations.norm(None, self.config.rms_norm_eps, FLOAT32)

    @property
    def first_variants(self) -> dict[str, str]:
        """Return the variants of the whole model's first layers."""
        return self._first_variants

    def tap(self, places: Sequence[int]) -> None:
        """In each step, keep the residual stream after these numbers of the whole model's layers, for the last stage.

        All stages get the same places, and pass on what they and those before them keep, in the order of the layers.
        """
        first, last = self._own
        self._taps_of_model = _TapsOfModel(tuple(places), tuple(sorted(place for place in places if place <= first)))
        own = [place - first for place in places if first < place <= last]
        begun = [0] if self.stage.is_first and self.config.per_layer is not None else []
        super().tap(own if self.stage.is_last else [*begun, *sorted(own), len(self.layers)])

    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step of the stage. Only the last stage's result has logits. Errors: ChannelEndedError."""
        passed = self._receive(len(inputs.positions))
        if not self.stage.is_last:
            inputs = inputs._replace(logits_rows=NO_INTS)
        result = self._run(inputs, passed)
        if not self.stage.is_last:
            if self.is_linked:
                self.stage.link.send(*self._left(result, passed, len(inputs.positions)).every)
        elif passed is not None and passed.states:
            return _LastResult(result, passed.states, self._taps_of_model)
        return result

    def _receive(self, num_tokens: int) -> "Passed | None":
        """Return what the stage before has passed on; None: this is the first one."""
        if self.stage.is_first:
            return None
        link, width = self.stage.link, self.config.hidden_size

        def room(name: str) -> Floats:
            return link.room(name, num_tokens, width)

        passed = Passed(
            [room(f"hidden {stream}") for stream in range(self._num_streams)],
            None if self.config.per_layer is None else room("embeddings"),
            [room(f"states {index}") for index in range(len(self._taps_of_model.earlier))],
        )
        if self.is_linked:
            link.receive(*passed.every)
        return passed

    def _run(self, inputs: ModelInputs, passed: "Passed | None") -> StepResult:
        """Run the layers. passed: of the tokens; None = this is the first stage."""
        if passed is not None:
            ids, (given,) = inputs.token_ids, passed.hidden
            begun = None if passed.embeddings is None else Begun(ids, passed.embeddings)
            inputs = inputs._replace(token_ids=-1 - np.arange(len(ids)), given=given, begun=begun)
        return super().forward(inputs)

    def _left(self, result: StepResult, passed: "Passed | None", num_tokens: int) -> "Passed":
        """Return what to pass on after a step."""
        assert isinstance(result, TappedResult), type(result)
        *own, hidden = np.moveaxis(result.states_of(np.arange(num_tokens)), 1, 0)
        if passed is not None:
            return Passed([hidden], passed.embeddings, [*passed.states, *own])
        embeddings = None if self.config.per_layer is None else own.pop(0)
        return Passed([hidden], embeddings, own)


class Passed(NamedTuple):
    """What a stage passes on of a step's tokens, each [T, hidden] float32."""

    hidden: list[Floats]  # the residual stream, or all streams
    embeddings: Floats | None  # which inputs of single layers are made of; None: there are none
    states: list[Floats]  # those that tap() keeps

    @property
    def every(self) -> list[Floats]:
        """Return all of it, in the order in which it is sent."""
        return [*self.hidden, *([] if self.embeddings is None else [self.embeddings]), *self.states]


class _TapsOfModel(NamedTuple):
    """The places of tap() in the whole model; and those of the stages before this one, in the order of the layers."""

    places: tuple[int, ...]
    earlier: tuple[int, ...]


class _LastResult:
    """The result of the last stage, with the hidden states [T, hidden] that those before it keep."""

    def __init__(self, result: StepResult, earlier: Sequence[Floats], taps: _TapsOfModel) -> None:
        self.logits, self.largest = result.logits, result.largest
        self.logits_of, self.hidden_of = result.logits_of, result.hidden_of
        self._result, self._earlier, self._taps = result, earlier, taps

    def states_of(self, rows: Ints) -> Floats:
        """Return what tap() keeps [n, taps, hidden] float32 of these tokens [n] int64."""
        assert isinstance(self._result, TappedResult), type(self._result)
        own = iter(np.moveaxis(self._result.states_of(rows), 1, 0))
        earlier = {place: states[rows] for place, states in zip(self._taps.earlier, self._earlier, strict=True)}
        return np.stack([earlier[place] if place in earlier else next(own) for place in self._taps.places], 1)
