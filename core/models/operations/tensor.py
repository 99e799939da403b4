"""Tensor: what a model's operations compute with. NumPy's arrays on the C kernels; torch's tensors elsewhere."""

from collections.abc import Callable
from typing import Any, TypeAlias

#: An array of NumPy or a tensor of torch. All operations of a model take and return the same of the two.
Tensor: TypeAlias = Any

#: A function from a tensor to a tensor: the parts of models.
Operation: TypeAlias = Callable[[Tensor], Tensor]
