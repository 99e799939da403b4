"""ValueForm: what V of a layer's attention is; kernels/cpu/c/layers/rope.h has the same forms."""

from typing import Literal

#: own: the product's columns behind those of K. normalised: these, each head normalised with weights of 1. keys: the
#: columns of K, before K itself is normalised and rotated, so normalised. shared: there are columns of Q only, and the
#: cache has K and V of another layer.
ValueForm = Literal["own", "normalised", "keys", "shared"]

#: How many heads of columns, of K and V, each form has for each KV head. In the order of the C kernels' numbers.
SIDES: dict[ValueForm, int] = {"own": 2, "normalised": 2, "keys": 1, "shared": 0}
