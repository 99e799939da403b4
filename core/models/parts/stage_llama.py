"""StageLlama: the layers of one pipeline stage, with embeddings in the first stage and the head in the last."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from core.models.config import ModelConfig
from core.models.layers.layer_kinds import windows
from core.models.llama import Llama, embedding_scale
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.operations import Product
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.parts.stage import Stage
from core.models.parts.weight_parts import WeightParts
from core.models.step import ModelInputs, StepResult
from ipc.errors import ConfigError
from ipc.tables.arrays import NO_INTS
from kernels.elements import FLOAT32, Dtype, element_name


class StageLlama(Llama):
    """A part of a Llama. It needs the C kernels.

    The residual stream of a step's tokens is passed in as given embeddings (kernels/cpu/c/layers/embedding.h), and the
    last layer's output is passed on.
    """

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, Weight]], dtype: Dtype, stage: Stage, **options: Any
    ) -> None:
        """Build the stage. config: the whole model's. weights: those that the stage reads. options: see Llama.

        Errors: those of Llama; ConfigError for more stages than layers; ChannelEndedError.
        """
        self.stage = stage
        super().__init__(stage.config(config), stage.renamed(config, weights), dtype, **options)
        assert isinstance(self.operations, CpuOperations), "a stage needs the C kernels"
        self.windows_of_model, self.num_blocks_per_page = windows(config), self.operations.blocks_per_page(config)
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
            self.tap([len(self.layers)])

    def _build_begin(self, parts: WeightParts) -> Product | None:
        if self.stage.is_first and not (self.stage.is_last and self.config.tie_word_embeddings):
            table = parts.take_matrix("model.embed_tokens.weight")
            self.embedding = self.operations.embedding(table, embedding_scale(self.config, self.dtype), None)
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

    @property
    def reads_features(self) -> bool:
        """Return False: given embeddings have another use here."""
        return False

    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step of the stage. Only the last stage's result has logits. Errors: ChannelEndedError."""
        link, count = self.stage.link, len(inputs.positions)
        if not self.stage.is_first:
            given = link.room(count, self.config.hidden_size)
            if self.is_linked:
                link.receive(given)
            inputs = inputs._replace(token_ids=-1 - np.arange(count), given=given)
        if self.stage.is_last:
            return super().forward(inputs)
        result = super().forward(inputs._replace(logits_rows=NO_INTS))
        if self.is_linked:
            link.send(result.states_of(np.arange(count)))  # type: ignore[attr-defined]
        return result
