"""ReadEnds: a model's embeddings and its head, read whole for a draft head in a process with a part of the model."""

from functools import cached_property
from pathlib import Path

from core.model_files.load_format import open_weights
from core.models.config import ModelConfig
from core.models.llama import Llama
from core.models.operations.head_place import TappedOperations
from core.models.operations.operations import Operations, Product
from core.models.operations.tensor import Operation
from core.models.parts.weight_parts import WeightParts
from ipc.options.config import EngineConfig
from kernels.elements import FLOAT32

_EMBEDDINGS, _HEAD, _BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"


class ReadEnds:
    """The ModelEnds of a whole model, with the bits of its own. Each is read when it is asked for."""

    def __init__(self, path: Path, model: ModelConfig, config: EngineConfig, part: Llama) -> None:
        """path, model: of the whole model, in the config's load_format. part: what this process has of it."""
        assert isinstance(part.operations, TappedOperations), type(part.operations)
        self._path, self._model, self._config, self._part = path, model, config, part
        self._operations: Operations = part.operations.of_head(model)[0]

    def embedding(self) -> Operation:
        """Return the embeddings of all tokens, without the model's factor. Errors: those of open_weights()."""
        head = self._product if self._model.tie_word_embeddings else None
        return self._operations.embedding(self._read(_EMBEDDINGS).take_matrix(_EMBEDDINGS), 1.0, head)

    def head(self) -> Product:
        """Return the head with the logits of all tokens. Errors: those of open_weights()."""
        return self._product

    @cached_property
    def _product(self) -> Product:
        name = _EMBEDDINGS if self._model.tie_word_embeddings else _HEAD
        parts = self._read(name, *([_BIAS] if self._model.head_bias else []))
        weight = parts.take_matrix(name)
        return self._operations.linear(weight, parts.take(_BIAS) if self._model.head_bias else None, out_dtype=FLOAT32)

    def _read(self, *names: str) -> WeightParts:
        model, part = self._model, self._part
        opened = open_weights(
            self._config.load_format, self._path, model, part.dtype, part.library, lambda name: name in names
        )
        return WeightParts(opened.tensors)
