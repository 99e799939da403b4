"""Rotary frequencies of transformers' models, settled once, so that they depend on no request's length.

With the rope types `longrope` and `dynamic`, transformers chooses the frequencies anew in each forward pass, by the
largest position in it. In a batch that is some other request's position, and keys that are in the KV cache would have
to change with it. Here the frequencies are those of a sequence of max_model_len tokens, always.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from core.models.transformers_attention import INSTEAD
from ipc.errors import UnsupportedModelError

_Result = TypeVar("_Result")


class _Call(NamedTuple):
    """One call of a module that rotates: by the kind of layer there may be several in a forward pass."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Any  # cosines and sines


class Rotation:
    """The modules of a model whose frequencies transformers changes; most models have none."""

    def __init__(self, model: Any) -> None:
        kinds = ((module, getattr(module, "rope_type", None)) for module in model.modules())
        self._kinds = {module: kind for module, kind in kinds if _settled(kind) != kind}  # module -> its rope types

    def __bool__(self) -> bool:
        return bool(self._kinds)

    @torch.inference_mode()
    def settle(self, run: Callable[[], _Result]) -> _Result:
        """Run a forward pass whose last position is the last that there may be, and keep the frequencies that it ends
        with. Errors: UnsupportedModelError."""
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
        """Hex; of the frequencies as they are settled."""
        found = hashlib.sha256()
        for module in self._kinds:
            for values in _frequencies(module).values():
                found.update(values.numpy().tobytes())
        return found.hexdigest()[:16]


def _settled(kind: Any) -> Any:
    """The rope type under which transformers leaves a module's frequencies alone; of a dict, for each kind of layer."""
    if isinstance(kind, dict):
        return {layers: _settled(one) for layers, one in kind.items()}
    return "settled" if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) else kind


def _frequencies(module: Any) -> dict[str, torch.Tensor]:
    """Copies of the buffers that a module rotates by."""
    buffers = module.named_buffers(recurse=False)
    return {
        name: buffer.clone()
        for name, buffer in buffers
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    }


def _check_use(module: Any, calls: list[_Call], before: dict[str, torch.Tensor]) -> None:
    """Where the frequencies have changed, the rotation must have changed with them. Errors: UnsupportedModelError."""
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
            f"{type(module).__name__}: its rotation goes by the longest request in a batch, and not by the frequencies "
            "that transformers keeps for it; with max_model_len at most its original_max_position_embeddings it would "
            f"not change{INSTEAD}"
        )
