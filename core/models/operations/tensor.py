"""Tensor: the type that a model's operations compute with: NumPy arrays on the C kernels, torch tensors elsewhere."""

from collections.abc import Callable
from typing import Any, TypeAlias

#: A NumPy array or a torch tensor. All operations of a model take and return the same one of the two.
Tensor: TypeAlias = Any

#: A function from a tensor to a tensor; models are built from these.
Operation: TypeAlias = Callable[[Tensor], Tensor]
