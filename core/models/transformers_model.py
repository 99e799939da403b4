"""Any causal language model of transformers, on this engine's KV cache and scheduler, at numerics level L0.

The model's own code runs, on a batch of tokens packed request after request; only attention is ours, through
transformers' attention interface. This file and
transformers_loading.py are all contact with transformers' internals. Products are torch's plain
ones, which may sum in another order for another number of rows: hence L0.
"""

from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from core.models.step import ONCE, HiddenResult, ModelInputs, StepResult
from core.models.transformers_loading import ATTENTION_NAME, INSTEAD, described, eos_token_ids, load_transformers_model
from ipc.arrays import AnyInts, Ints
from ipc.config import Numerics
from ipc.errors import EngineCoreError, UnsupportedModelError
from kernels.memory.kv_cache import KVCache, bytes_per_block
from kernels.torch.attention import AttentionMetadata, attention_metadata, paged_attention

#: How far our logits may be from those of the model's own attention, as a part of the largest one: rounding.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}

#: What a model may ask of attention that ours cannot do, and the values that ask nothing.
_EXTRAS: dict[str, tuple[object, ...]] = {
    "softcap": (None, 0.0),
    "s_aux": (None,),
    "position_bias": (None,),
    "is_causal": (None, True),
}


class _Step(NamedTuple):
    """What attention must know of the step under way."""

    cache: KVCache
    metadata: dict[int | None, AttentionMetadata]  # by sliding window
    write_rows: torch.Tensor
    stored: torch.Tensor


class _Shape(NamedTuple):
    """One layer's heads, as seen in a trial run."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


_step: ContextVar[_Step] = ContextVar("step")
_trial: ContextVar[dict[int, tuple[_Shape, int | None]]] = ContextVar("trial")  # layer -> heads, sliding window


class TransformersModel:
    """path: a model folder with safetensors; made_up: its config.json is enough, the weights are random, the same
    every time. Errors: ModelFileError when transformers is not installed or cannot read the folder;
    UnsupportedModelError, naming the reason, for a model that this engine would run wrongly."""

    numerics: Numerics = "L0"
    sampler = None

    def __init__(self, path: Path, dtype: torch.dtype, *, made_up: bool = False) -> None:
        self.dtype = dtype
        self._model = load_transformers_model(path, dtype, made_up, _attend)
        self._architecture = type(self._model).__name__
        try:
            self._prepare()
        except (EngineCoreError, MemoryError):
            raise
        except Exception as error:
            needs_more = isinstance(error, AttributeError) and error.name is not None and error.obj is None
            reason = "wants an attention mask or a cache of its own kind" if needs_more else "does not run"
            raise self._refusal(f"its code {reason} on packed batches ({described(error)})") from error

    def _prepare(self) -> None:
        config = self._model.config.get_text_config()
        self._body = self._model.get_decoder()
        if self._body is self._model:
            raise self._refusal("its layers and its head are not apart")
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = int(getattr(config, "max_position_embeddings", 0) or 2048)
        self.eos_token_ids = eos_token_ids(self._model)
        self._num_layers = int(config.num_hidden_layers)
        self._shape, self._windows = self._try_out()
        self._check_against_its_own()

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._architecture}: {reason}{INSTEAD}")

    @property
    def variant(self) -> str:
        return f"transformers {_version()} {self._architecture}"

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
        generation: int = ONCE,
    ) -> tuple[AttentionMetadata, ...]:
        """One for each sliding window among the layers."""
        return tuple(
            attention_metadata(num_tokens, context_lens, block_tables, cache, window) for window in self._windows
        )

    def forward(self, inputs: ModelInputs) -> StepResult:
        hidden = self.hidden_states(inputs)
        return HiddenResult(hidden, inputs.logits_rows, self.vocab_size, self._to_logits, torch.Tensor.float)

    @torch.inference_mode()
    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        """Run the body: what stands behind the final norm [T, hidden]."""
        slots, cache = inputs.slots, inputs.cache
        stored = torch.nonzero(slots >= 0).flatten()
        by_window = dict(zip(self._windows, inputs.attention, strict=True))
        token = _step.set(_Step(cache, by_window, cache.slot_rows(slots[stored]), stored))
        try:
            output = self._body(input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False)
        finally:
            _step.reset(token)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _to_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> logits [n, vocab] float32. The model's own code makes them, scalings and all: it is
        called with a body that is done already."""
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        picked = hidden[None]

        class Done(BaseModelOutputWithPastAndCrossAttentions):
            router_logits = None  # read by the heads of mixtures of experts

        self._body.forward = lambda *_, **__: Done(last_hidden_state=picked)
        try:
            output = self._model(input_ids=torch.arange(len(hidden))[None], use_cache=False)
        finally:
            del self._body.forward  # the class's own shows again
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _try_out(self) -> tuple[_Shape, tuple[int | None, ...]]:
        """Run two tokens to see what the layers ask of attention: the heads of all, and the windows among them."""
        num_layers = self._num_layers
        token = _trial.set({})
        try:
            with torch.inference_mode():
                self._model(torch.zeros(1, 2, dtype=torch.int64), position_ids=torch.arange(2)[None], use_cache=False)
            seen = _trial.get()
        finally:
            _trial.reset(token)
        if sorted(seen) != list(range(num_layers)):
            raise self._refusal(
                f"{len(seen)} of {num_layers} layers use transformers' attention interface; the others compute "
                "attention by themselves, or are of a kind (state space, linear attention) that has no place in a KV "
                "cache of blocks"
            )
        shapes = {shape for shape, _ in seen.values()}
        shape = seen[0][0]
        if len(shapes) > 1 or shape.value_dim > shape.head_dim:
            raise self._refusal(f"its layers' heads differ in number or size: {shapes}")
        if shape.num_heads % shape.num_kv_heads:
            raise self._refusal(f"{shape.num_heads} query heads cannot share {shape.num_kv_heads} KV heads evenly")
        return shape, tuple(dict.fromkeys(seen[layer][1] for layer in range(num_layers)))

    def _check_against_its_own(self) -> None:
        """Two short requests packed into one batch of ours must give what the model's own eager attention gives each
        alone: else its attention does something that ours does not know, or its code lets one request's tokens see
        another's (a convolution over the sequence, say), and it is refused."""
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, self.vocab_size, length) for length in (7, 5)]
        expected = torch.cat([self._eager_logits(prompt) for prompt in prompts])
        scale = float(expected.abs().amax()) or 1.0
        tolerance = _TOLERANCE[self.dtype]
        together = float((self._logits_of(prompts) - expected).abs().amax()) / scale
        if together < tolerance:
            return
        alone = torch.cat([self._logits_of([prompt]) for prompt in prompts])
        error = float((alone - expected).abs().amax()) / scale
        if error < tolerance:
            raise self._refusal(
                f"two requests in one batch change each other's logits by {together:.1%}: its code does not keep "
                "packed sequences apart by position_ids"
            )
        raise self._refusal(
            f"with this engine's attention its logits are off by {error:.2%} of the largest (at most {tolerance:.1%} "
            "is rounding): its own attention does something that this engine does not know"
        )

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

    def _logits_of(self, prompts: list[Ints]) -> torch.Tensor:
        """Logits of the last token of each prompt [n, vocab], in a cache of their own."""
        cache = self.allocate_cache(len(prompts) + 1, 16)
        lengths = np.array([len(prompt) for prompt in prompts])
        tables = np.arange(1, len(prompts) + 1)[:, None]
        positions = np.concatenate([np.arange(length) for length in lengths])
        slots = np.repeat(tables[:, 0] * 16, lengths) + positions
        inputs = ModelInputs(
            token_ids=torch.from_numpy(np.concatenate(prompts)),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            attention=self.attention_metadata(lengths, lengths, tables, cache),
            cache=cache,
            logits_rows=torch.from_numpy(np.cumsum(lengths) - 1),
        )
        return self.forward(inputs).logits


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
    for name, neutral in _EXTRAS.items():
        if extras.get(name) is not None and extras[name] not in neutral:
            raise UnsupportedModelError(
                f"{type(module).__name__}: {name} is not supported by the generic path{INSTEAD}"
            )
    trial = _trial.get(None)
    if trial is not None:
        shape = _Shape(query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        trial[module.layer_idx] = shape, sliding_window
        return query.transpose(1, 2)[..., : shape.value_dim], None
    step = _step.get(None)
    if step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: its head runs layers of its own, outside a step{INSTEAD}"
        )
    num_tokens, width, value_dim = key.shape[2], key.shape[1] * key.shape[3], value.shape[3]
    if value_dim < key.shape[3]:  # the cache has one size for both (DeepSeek's values are shorter)
        value = torch.nn.functional.pad(value, (0, key.shape[3] - value_dim))
    kv = torch.cat((key[0].transpose(0, 1).reshape(-1, width), value[0].transpose(0, 1).reshape(-1, width)), -1)
    step.cache.write(module.layer_idx, step.write_rows, kv[step.stored])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = query[0].transpose(0, 1).float().contiguous()
    out = paged_attention(q, step.cache, module.layer_idx, step.metadata[sliding_window], scale)
    return out.view(1, num_tokens, query.shape[1], -1)[..., :value_dim], None


def _version() -> str:
    import transformers

    return str(transformers.__version__)
