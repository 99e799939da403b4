"""Any causal language model of transformers, on this engine's KV cache and scheduler, at numerics level L0.

The model's own code runs, on a batch of tokens packed request after request; only attention is ours, through
transformers' attention interface. The files transformers_*.py are all contact with transformers' internals. Products
are torch's plain ones, which may sum in another order for another number of rows: hence L0.
"""

import inspect
from pathlib import Path

import torch

from core.models.transformers_attention import INSTEAD, Step, current_step
from core.models.transformers_check import find_difference
from core.models.transformers_loading import ATTENTION_NAME, described, eos_token_ids, load_transformers_model
from core.models.transformers_rotation import Rotation
from core.models.transformers_trial import Layers, TrialError, try_out
from ipc.arrays import AnyInts, Ints
from ipc.config import Numerics
from ipc.errors import EngineCoreError, UnsupportedModelError
from kernels.memory.kv_cache import KVCache, bytes_per_block
from kernels.torch.attention import AttentionMetadata, attention_metadata


class TransformersModel:
    """path: a model folder with safetensors; made_up: its config.json is enough, the weights are random, the same
    every time; max_model_len: tokens of the longest request, None = the model's own. Errors: ModelFileError when
    transformers is not installed or cannot read the folder; UnsupportedModelError, naming the reason, for a model that
    this engine would run wrongly."""

    numerics: Numerics = "L0"
    sampler = None

    def __init__(
        self, path: Path, dtype: torch.dtype, *, made_up: bool = False, max_model_len: int | None = None
    ) -> None:
        self.dtype = dtype
        self._model = load_transformers_model(path, dtype, made_up)
        self._architecture = type(self._model).__name__
        try:
            self._prepare(max_model_len)
        except TrialError as error:
            raise self._refusal(str(error)) from error
        except (EngineCoreError, MemoryError):
            raise
        except Exception as error:
            needs_more = isinstance(error, AttributeError) and error.name is not None and error.obj is None
            reason = "wants an attention mask or a cache of its own kind" if needs_more else "does not run"
            raise self._refusal(f"its code {reason} on packed batches ({described(error)})") from error

    def _prepare(self, max_model_len: int | None) -> None:
        config = self._model.config.get_text_config()
        self._body = self._model.get_decoder()
        if self._body is self._model:
            raise self._refusal("its layers and its head are not apart")
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = int(getattr(config, "max_position_embeddings", 0) or 2048)
        self.eos_token_ids = eos_token_ids(self._model)
        self._num_layers = int(config.num_hidden_layers)
        self._rotation = Rotation(self._model)
        self._length = min(max_model_len or self.max_model_len, self.max_model_len)
        self._shape, self._windows = self._try_out()
        if "position_ids" not in inspect.signature(self._body.forward).parameters:
            raise self._refusal("its code takes no position_ids, and counts the tokens of a batch instead")
        smallest = min((window for window in self._windows if window is not None), default=None)
        if difference := find_difference(self, self.dtype, smallest, self._length, self._eager_logits):
            raise self._refusal(difference)

    def _try_out(self) -> Layers:
        return self._rotation.settle(lambda: try_out(self._model, self._num_layers, self._length))

    def settle_length(self, max_model_len: int) -> None:
        """Rotary frequencies that transformers would choose by length are those of max_model_len tokens from now on."""
        if self._rotation and max_model_len != self._length:
            self._length = max_model_len
            self._try_out()

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._architecture}: {reason}{INSTEAD}")

    @property
    def variant(self) -> str:
        rotation = f" rotation={self._rotation.digest()}" if self._rotation else ""
        return f"transformers {_version()} {self._architecture}{rotation}"

    def wake(self) -> None:
        """torch wakes its threads itself."""

    def bytes_per_block(self, block_size: int) -> int:
        shape = self._shape
        return bytes_per_block(block_size, shape.num_kv_heads, shape.head_dim, self._num_layers, self.dtype)

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        shape = self._shape
        return KVCache(self._num_layers, num_blocks, block_size, shape.num_kv_heads, shape.head_dim, self.dtype)

    def attention_metadata(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
    ) -> tuple[AttentionMetadata, ...]:
        """One for each sliding window among the layers."""
        return tuple(
            attention_metadata(num_tokens, context_lens, block_tables, cache, window) for window in self._windows
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: tuple[AttentionMetadata, ...],
        cache: KVCache,
        logits_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden_states(token_ids, positions, slots, metadata, cache)
        if len(logits_rows) == 0:
            return hidden, hidden.new_empty(0, self.vocab_size)
        return hidden, self.compute_logits(hidden, logits_rows)

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: tuple[AttentionMetadata, ...],
        cache: KVCache,
    ) -> torch.Tensor:
        stored = torch.nonzero(slots >= 0).flatten()
        by_window = dict(zip(self._windows, metadata, strict=True))
        step = Step(cache, by_window, cache.slot_rows(slots[stored]), stored, set())
        token = current_step.set(step)
        try:
            output = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            current_step.reset(token)
        if len(step.layers) != self._num_layers:
            raise self._refusal(f"{len(step.layers)} of {self._num_layers} layers called attention in this step")
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The model's own code makes the logits, scalings and all: it is called with a body that is done already."""
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        picked = hidden.index_select(0, rows)[None]

        class Done(BaseModelOutputWithPastAndCrossAttentions):
            router_logits = None  # read by the heads of mixtures of experts

        self._body.forward = lambda *_, **__: Done(last_hidden_state=picked)
        try:
            output = self._model(input_ids=rows[None], use_cache=False)
        finally:
            del self._body.forward  # the class's own shows again
        logits: torch.Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def _eager_logits(self, prompt: Ints) -> torch.Tensor:
        """Logits of the last token [1, vocab], by the model's code alone."""
        self._model.set_attn_implementation("eager")
        try:
            output = self._model(torch.from_numpy(prompt)[None], use_cache=False)
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        logits: torch.Tensor = output.logits[0, -1:].float()
        return logits


def _version() -> str:
    import transformers

    return str(transformers.__version__)
