"""TransformersModel: any causal language model of transformers, on this engine's KV cache and scheduler.

The model's own code runs on a batch of tokens packed request after request. Only attention is this engine's, through
transformers' attention interface. Only the files transformers_*.py use transformers' internals. Products are torch's
plain ones, which may sum in a different order for a different number of rows, so the numerics level is L0.
"""

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from core.models.interface import Model
from core.models.step import ONCE, HiddenResult, ModelInputs, StepResult
from core.models.transformers.transformers_attention import INSTEAD, Step, current_step
from core.models.transformers.transformers_loading import (
    ATTENTION_NAME,
    described,
    eos_token_ids,
    load_transformers_model,
)
from core.models.transformers.transformers_trial import Layers, TrialError, try_out
from ipc.errors import EngineCoreError, UnsupportedModelError
from ipc.options.model_options import Numerics
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.elements import BFLOAT16, FLOAT32, Dtype
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


# The start-up check of a transformers model: two requests on this engine, compared with the model's own attention.


#: The largest deviation from the logits of the model's own attention that counts as rounding, relative to the largest
#: logit.
_TOLERANCE = {FLOAT32: 1e-3, BFLOAT16: 0.05}

_BLOCK_SIZE = 16
_LENGTHS = 7, 5  # tokens of the two prompts
_LATE = 1, 2  # of these, the tokens that a second step computes
_MOST_TOKENS = 64  # maximum length of a prompt that is extended beyond a sliding window

Prompt = Ints

_ZERO = np.zeros(1, np.int64)


def find_difference(
    model: Model,
    dtype: Dtype,
    smallest_window: int | None,
    max_model_len: int,
    own_logits: Callable[[Prompt], Floats],
) -> str | None:
    """Return what is wrong with the model on this engine; None if its logits match those of its own attention.

    Two prompts of different lengths are computed in two steps as one batch. The second step is a decode step for one of
    them. It is beyond the sliding window if the window is small. It also has a token at the last possible position.

    own_logits: computes the logits [1, vocab] of a prompt's last token with only the model's own code.
    """
    longest, other = _LENGTHS
    if smallest_window is not None and smallest_window + 2 <= min(_MOST_TOKENS, max_model_len):
        longest = max(longest, smallest_window + 2)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, length) for length in (longest, other)]
    expected = np.concatenate([own_logits(prompt) for prompt in prompts])
    scale = float(np.abs(expected).max()) or 1.0

    def error_of(logits: Floats) -> float:
        return float(np.abs(logits - expected).max()) / scale

    together = error_of(_in_steps(model, prompts, _LATE, far=max_model_len - 1))
    if together < _TOLERANCE[dtype]:
        return None
    at_once = error_of(np.concatenate([_in_steps(model, [prompt], ()) for prompt in prompts]))
    if not at_once < _TOLERANCE[dtype]:
        return (
            f"with this engine's attention its logits are off by {at_once:.2%} of the largest (at most "
            f"{_TOLERANCE[dtype]:.1%} is rounding): its own attention does something that this engine does not support"
        )
    pairs = zip(prompts, _LATE, strict=True)
    decoded = error_of(np.concatenate([_in_steps(model, [prompt], (late,)) for prompt, late in pairs]))
    if not decoded < _TOLERANCE[dtype]:
        return (
            f"after a second step its logits are off by {decoded:.2%} of the largest: its code keeps other state "
            "between tokens than keys and values"
        )
    return (
        f"two requests in one batch change each other's logits by {together:.1%}: its code does not keep packed "
        "sequences apart by position_ids"
    )


def _in_steps(model: Model, prompts: list[Prompt], late: tuple[int, ...], far: int | None = None) -> Floats:
    """Return the logits [n, vocab] of the last token of each prompt, computed with a new cache.

    late: number of tokens of each prompt that a second step computes; empty: there is one step. far: position of an
    additional token in the last step.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    width = -(-int(lengths.max()) // _BLOCK_SIZE)
    tables = 1 + np.arange((len(prompts) + 1) * width).reshape(-1, width)  # the last row is for the far token
    cache = model.allocate_cache(int(tables[-1, -1]) + 1, _BLOCK_SIZE)
    starts = np.zeros_like(lengths)
    if late:
        first_ends = lengths - np.array(late)
        _step(model, cache, tables, prompts, starts, first_ends, None)
        starts = first_ends
    return _step(model, cache, tables, prompts, starts, lengths, far)


def _step(
    model: Model, cache: KVCache, tables: Prompt, prompts: list[Prompt], starts: Prompt, ends: Prompt, far: int | None
) -> Floats:
    """Compute the prompts' tokens from starts to ends, and the far token; return the last tokens' logits [n, vocab]."""
    positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    tokens = [prompt[chosen] for prompt, chosen in zip(prompts, positions, strict=True)]
    places = positions  # token index in the request's blocks
    if far is not None:
        positions, tokens, places = [*positions, np.array([far])], [*tokens, _ZERO], [*places, _ZERO]
        starts, ends = np.append(starts, 0), np.append(ends, 1)
    rows = zip(tables, places, strict=False)  # the last table is unused if there is no far token
    slots = [table[chosen // _BLOCK_SIZE] * _BLOCK_SIZE + chosen % _BLOCK_SIZE for table, chosen in rows]
    columns = (np.concatenate(column) for column in (tokens, positions, slots))
    token_column, position_column, slot_column = columns
    counts = ends - starts
    attention = model.attention_metadata(counts, ends, tables[: len(counts)], cache)
    last = np.cumsum(counts)[: len(prompts)] - 1
    return model.forward(ModelInputs(token_column, position_column, slot_column, attention, cache, last)).logits


# Rotary frequencies of transformers models, fixed once, so that they do not depend on a request's length.
#
# With the rope types `longrope` and `dynamic`, transformers chooses the frequencies again in each forward pass, by the
# largest position in it. In a batch this may be another request's position, and stored keys would have to change too.
# Here the frequencies are always those for a sequence of max_model_len tokens.


_Result = TypeVar("_Result")


class _Call(NamedTuple):
    """One call of a rotating module. A forward pass may have several, for different kinds of layers."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Any  # cosines and sines


class Rotation:
    """The modules of a model whose frequencies transformers changes by length. Most models have none."""

    def __init__(self, model: Any) -> None:
        kinds = ((module, getattr(module, "rope_type", None)) for module in model.modules())
        self._kinds = {module: kind for module, kind in kinds if _settled(kind) != kind}  # module -> its rope types

    def __bool__(self) -> bool:
        return bool(self._kinds)

    @torch.inference_mode()
    def settle(self, run: Callable[[], _Result]) -> _Result:
        """Run a forward pass, keep the frequencies that it ends with, and return its result.

        run: a forward pass whose last position is the last possible one. Errors: UnsupportedModelError if a module does
        not use the frequencies that it keeps.
        """
        before = {module: _frequencies(module) for module in self._kinds}
        calls: dict[Any, list[_Call]] = {module: [] for module in self._kinds}

        def note(module: Any, arguments: Any, options: Any, output: Any) -> None:
            calls[module].append(_Call(arguments, options, output))

        hooks = [module.register_forward_hook(note, with_kwargs=True) for module in self._kinds]
        for module, kind in self._kinds.items():
            module.rope_type = kind
        try:
            result = run()
        finally:
            for hook in hooks:
                hook.remove()
            for module, kind in self._kinds.items():
                module.rope_type = _settled(kind)
        for module in self._kinds:
            _check_use(module, calls[module], before[module])
        return result

    def digest(self) -> str:
        """Return a digest of the fixed frequencies: 16 hexadecimal digits."""
        found = hashlib.sha256()
        for module in self._kinds:
            for values in _frequencies(module).values():
                found.update(values.numpy().tobytes())
        return found.hexdigest()[:16]


def _settled(kind: Any) -> Any:
    """Return a rope type for which transformers does not change a module's frequencies.

    kind: the module's rope type, or a dict of them by kind of layer. A type that changes nothing is returned unchanged.
    """
    if isinstance(kind, dict):
        return {layers: _settled(one) for layers, one in kind.items()}
    return "settled" if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) else kind


def _frequencies(module: Any) -> dict[str, torch.Tensor]:
    """Return copies of the module's buffers of frequencies, by name."""
    buffers = module.named_buffers(recurse=False)
    return {
        name: buffer.clone()
        for name, buffer in buffers
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    }


def _check_use(module: Any, calls: list[_Call], before: dict[str, torch.Tensor]) -> None:
    """Check that the module's rotation has changed if its frequencies have.

    before: the frequencies before the calls. Errors: UnsupportedModelError.
    """
    now = _frequencies(module)
    if all(torch.equal(now[name], values) for name, values in before.items()):
        return
    for name, values in before.items():
        getattr(module, name).copy_(values)
    again = [module(*call.arguments, **call.options) for call in calls]
    for name, values in now.items():
        getattr(module, name).copy_(values)
    pairs = [pair for call, other in zip(calls, again, strict=True) for pair in zip(call.output, other, strict=True)]
    if all(torch.equal(one, other) for one, other in pairs):
        raise UnsupportedModelError(
            f"{type(module).__name__}: its rotation uses the longest request in a batch, not the frequencies "
            "that transformers keeps for it; with max_model_len at most its original_max_position_embeddings it would "
            f"not change{INSTEAD}"
        )
