"""TransformersModel: any causal language model of transformers, on this engine's KV cache and scheduler.

The model's own code runs on a batch of tokens packed request after request. Only attention is this engine's, through
transformers' attention interface. Only the files transformers_*.py use transformers' internals. Products are torch's
plain ones, which may sum in a different order for a different number of rows, so the numerics level is L0.
"""

import inspect
from pathlib import Path

import torch

from core.models.step import ONCE, HiddenResult, ModelInputs, StepResult
from core.models.transformers.transformers_attention import INSTEAD, Step, current_step
from core.models.transformers.transformers_check import find_difference
from core.models.transformers.transformers_loading import (
    ATTENTION_NAME,
    described,
    eos_token_ids,
    load_transformers_model,
)
from core.models.transformers.transformers_rotation import Rotation
from core.models.transformers.transformers_trial import Layers, TrialError, try_out
from ipc.errors import EngineCoreError, UnsupportedModelError
from ipc.options.model_options import Numerics
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.elements import Dtype
from kernels.memory.kv_cache import KVCache, bytes_per_block
from kernels.torch.attention import AttentionMetadata, attention_metadata
from kernels.torch.kv_cache import TorchKVCache
from kernels.torch.tensors import DTYPES, to_array, to_tensor


class TransformersModel:
    """A transformers model, loaded and checked. The methods are documented at Model."""

    numerics: Numerics = "L0"
    sampler = None

    def __init__(self, path: Path, dtype: Dtype, *, made_up: bool = False, max_model_len: int | None = None) -> None:
        """Load the model and check that this engine runs it correctly.

        path: a model folder with safetensors. made_up: use random weights, the same in each run; config.json is enough.
        max_model_len: tokens of the longest request; None = the model's maximum. Errors: ModelFileError if transformers
        is not installed or cannot read the folder; UnsupportedModelError, naming the reason, for a model that this
        engine would run wrongly.
        """
        self.dtype = dtype
        self._model = load_transformers_model(path, DTYPES[dtype], made_up)
        self._architecture = type(self._model).__name__
        try:
            self._prepare(max_model_len)
        except TrialError as error:
            raise self._refusal(str(error)) from error
        except (EngineCoreError, MemoryError):
            raise
        except Exception as error:
            needs_more = isinstance(error, AttributeError) and error.name is not None and error.obj is None
            reason = "needs its own kind of attention mask or cache" if needs_more else "does not run"
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
        """Set the rotary frequencies that transformers chooses by length to those for max_model_len tokens."""
        if self._rotation and max_model_len != self._length:
            self._length = max_model_len
            self._try_out()

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._architecture}: {reason}{INSTEAD}")

    @property
    def variant(self) -> str:
        """Return the name of the code in use, with transformers' version and the rotation; part of the fingerprint."""
        rotation = f" rotation={self._rotation.digest()}" if self._rotation else ""
        return f"torch={torch.__version__} transformers {_version()} {self._architecture}{rotation}"

    def wake(self) -> None:
        """Do nothing: torch wakes its own threads."""

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache for one block of block_size tokens, all layers together."""
        shape = self._shape
        return bytes_per_block(block_size, shape.num_kv_heads, shape.head_dim, self._num_layers, self.dtype)

    def allocate_cache(self, num_blocks: int, block_size: int) -> TorchKVCache:
        """Allocate a KV cache. Errors: MemoryError."""
        shape = self._shape
        return TorchKVCache(
            self._num_layers, num_blocks, block_size, shape.num_kv_heads, head_dim=shape.head_dim, dtype=self.dtype
        )

    def attention_metadata(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        generation: int = ONCE,
        wholes: Ints | None = None,
        window_tables: AnyInts | None = None,
    ) -> tuple[AttentionMetadata, ...]:
        """Return the attention metadata of a step, one per sliding window among the layers."""
        assert wholes is None, "only models of our own read features"
        assert window_tables is None, "only the C kernels' caches have pages"
        return tuple(
            attention_metadata(num_tokens, context_lens, block_tables, cache, window) for window in self._windows
        )

    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step; see Model."""
        hidden = self.hidden_states(inputs)
        return HiddenResult(
            inputs.logits_rows,
            self.vocab_size,
            lambda rows: to_array(self._to_logits(hidden[to_tensor(rows)])),
            lambda rows: to_array(hidden[to_tensor(rows)].float()),
        )

    @torch.inference_mode()
    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        """Run the model without its head; return the hidden states after the final norm [T, hidden]."""
        cache = inputs.cache
        assert isinstance(cache, TorchKVCache), type(cache)
        slots = to_tensor(inputs.slots)
        stored = torch.nonzero(slots >= 0).flatten()
        by_window = dict(zip(self._windows, inputs.attention, strict=True))
        step = Step(cache, by_window, cache.slot_rows(slots[stored]), stored, set())
        token = current_step.set(step)
        try:
            columns = {
                "input_ids": to_tensor(inputs.token_ids)[None],
                "position_ids": to_tensor(inputs.positions)[None],
            }
            output = self._body(**columns, use_cache=False)
        finally:
            current_step.reset(token)
        if len(step.layers) != self._num_layers:
            raise self._refusal(f"{len(step.layers)} of {self._num_layers} layers called attention in this step")
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _to_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab] float32 of hidden [n, hidden].

        The model's own code computes them, with its scalings. For this call its body is replaced by a function that
        returns hidden.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        picked = hidden[None]

        class Done(BaseModelOutputWithPastAndCrossAttentions):
            router_logits = None  # the heads of mixtures of experts read this

        self._body.forward = lambda *_, **__: Done(last_hidden_state=picked)
        try:
            output = self._model(input_ids=torch.arange(len(hidden))[None], use_cache=False)
        finally:
            del self._body.forward  # restores the class's method
        logits: torch.Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def _eager_logits(self, prompt: Ints) -> Floats:
        """Return the logits [1, vocab] of the last token, computed by the model's code alone."""
        self._model.set_attn_implementation("eager")
        try:
            output = self._model(torch.from_numpy(prompt)[None], use_cache=False)
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        return to_array(output.logits[0, -1:].float())


def _version() -> str:
    import transformers

    return str(transformers.__version__)
