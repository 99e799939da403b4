"""Pooler: turns a prompt's hidden states into the vectors that a pooling request returns."""

import math
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np

from ipc.params.pooling_params import PoolingParams
from ipc.tables.arrays import Doubles, Floats

#: Which hidden states make up a prompt's vector. "last" and "cls": those of the last and the first token.
Method = Literal["last", "cls", "mean", "max"]
#: What classifiers apply to their logits.
Activation = Literal["softmax", "sigmoid", "none"]

_MAX_EXPONENT = 709.0  # its exponential still fits a float64, and the sigmoid rounds to a float32 of 0


class Norm(NamedTuple):
    """A layer normalisation after the pooling."""

    weight: Doubles  # [d]
    eps: float

    def __call__(self, x: Doubles) -> Doubles:
        """Return x [n, d] normalised."""
        x = x - x.mean(axis=1, keepdims=True)
        normed: Doubles = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.eps) * self.weight
        return normed


class Dense(NamedTuple):
    """A linear layer after the pooling, with float64 sums: norm(activation(weight @ x + bias))."""

    weight: Doubles  # [out, in]
    bias: Doubles | None  # [out]
    activation: Literal["identity", "tanh", "gelu"] = "identity"
    norm: Norm | None = None

    def __call__(self, x: Doubles) -> Doubles:
        """Return the layer's output [n, out] for x [n, in]. Each vector is computed separately."""
        rows = [(self.weight * vector).sum(axis=1) for vector in x]
        out: Doubles = np.stack(rows) if rows else np.empty((0, len(self.weight)))
        if self.bias is not None:
            out += self.bias
        if self.activation == "tanh":
            out = np.tanh(out)
        elif self.activation == "gelu":
            out = out * 0.5 * (1.0 + np.array([math.erf(x) for x in (out / math.sqrt(2)).ravel()]).reshape(out.shape))
        return out if self.norm is None else self.norm(out)


class Pooler(NamedTuple):
    """How a model pools. Everything after the hidden states is computed in float64, and rounded to float32 once."""

    method: Method
    hidden_size: int
    layers: tuple[Dense, ...] = ()  # after the pooling
    normalises: bool = True  # embeddings have length 1, unless a request says otherwise
    classifier: tuple[Dense, ...] = ()  # for the tasks "classify" and "token_classify"; empty: the model embeds
    activation: Activation = "none"
    is_whole: bool = False  # every task needs the whole prompt, and there are no per-token vectors

    @property
    def tasks(self) -> dict[str, int]:
        """Return the model's tasks, the default one first, with the widths of their vectors."""
        layers = self.layers + self.classifier
        names = ["classify", "token_classify"] if self.classifier else ["embed", "token_embed"]
        if self.classifier and self.is_whole:
            names.remove("token_classify")
        return dict.fromkeys(names, len(layers[-1].weight) if layers else self.hidden_size)

    @property
    def variant(self) -> str:
        """Return the names of what determines the vectors' bits after the model; part of the fingerprint."""
        digest = blake2b(digest_size=8)
        for layer in self.layers + self.classifier:
            digest.update(layer.weight.tobytes() + (b"" if layer.bias is None else layer.bias.tobytes()))
        return f"{self.method}-{self.normalises}-{self.activation}-{digest.hexdigest()}"

    @property
    def whole_prompt_tasks(self) -> tuple[str, ...]:
        """Return the tasks that need more tokens than the last one."""
        everything = ("embed", "classify") if self.method != "last" or self.is_whole else ()
        return (*everything, "token_embed", "token_classify")

    def __call__(self, pooled: Doubles, params: PoolingParams) -> Floats:
        """Return the vectors [n, width] float32 of pooled hidden states [n, hidden]."""
        x = pooled
        for layer in self.layers + self.classifier:
            x = layer(x)
        if self.classifier:
            if params.use_activation is not False:
                x = _activated(x, self.activation)
        else:
            x = x[:, : params.dimensions]
            if self.normalises if params.use_activation is None else params.use_activation:
                x = x / np.maximum(np.sqrt((x * x).sum(axis=1, keepdims=True)), 1e-12)
        return x.astype(np.float32)


def _activated(logits: Doubles, activation: Activation) -> Doubles:
    match activation:
        case "sigmoid":
            return np.reciprocal(1.0 + np.exp(np.minimum(-logits, _MAX_EXPONENT)))
        case "softmax":
            powers: Doubles = np.exp(logits - logits.max(axis=1, keepdims=True))
            powers /= powers.sum(axis=1, keepdims=True)
            return powers
        case "none":
            return logits
