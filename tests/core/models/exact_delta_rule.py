"""The gated delta rule in float64: transformers' own computes in float32 whatever the model's type is."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

_NAME = "torch_chunk_gated_delta_rule"


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def exact_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token; query and key [1, T, groups, d], value [1, T, heads, e], g and beta [1, T, heads]."""
    repeats = value.shape[2] // key.shape[2]
    query, key = (_unit(one.double()).repeat_interleave(repeats, 2) for one in (query, key))
    query = query * query.shape[-1] ** -0.5
    state, results = torch.zeros(value.shape[2], key.shape[3], value.shape[3], dtype=torch.float64), []
    for token in range(value.shape[1]):
        state = state * g[0, token].exp()[:, None, None]
        known = torch.einsum("hk,hkv->hv", key[0, token], state)
        added = (value[0, token] - known) * beta[0, token][:, None]
        state = state + key[0, token][:, :, None] * added[:, None]
        results.append(torch.einsum("hk,hkv->hv", query[0, token], state))
    return torch.stack(results)[None], state[None]


@contextlib.contextmanager
def delta_rule_in_float64(model: Any) -> Iterator[None]:
    """Let transformers' model of gated delta nets compute in its own type; others are left alone."""
    module = sys.modules[type(model).__module__]
    before = getattr(module, _NAME, None)
    if before is not None:
        setattr(module, _NAME, exact_delta_rule)
    try:
        yield
    finally:
        if before is not None:
            setattr(module, _NAME, before)
