"""Rotary frequencies of transformers models, fixed once, so that they do not depend on a request's length.

With the rope types `longrope` and `dynamic`, transformers chooses the frequencies again in each forward pass, by the
largest position in it. In a batch this may be another request's position, and stored keys would have to change too.
Here the frequencies are always those for a sequence of max_model_len tokens.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from core.models.transformers.transformers_attention import INSTEAD
from ipc.errors import UnsupportedModelError

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
