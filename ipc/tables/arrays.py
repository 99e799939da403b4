"""Type aliases of NumPy columns, by dtype and by meaning, and shared empty columns.

kernels/arrays.py has the aliases of the kernels, which import no other package of the project.
"""

from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

AnyInts: TypeAlias = NDArray[np.integer[Any]]
Ints: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]
UInt64s: TypeAlias = NDArray[np.uint64]
UInt32s: TypeAlias = NDArray[np.uint32]
UInt16s: TypeAlias = NDArray[np.uint16]
UInt8s: TypeAlias = NDArray[np.uint8]
Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]

# By meaning. The scheduler uses int64, plans and pools use int32; functions with these types accept both.
Rows: TypeAlias = AnyInts  # numbers of rows of a table
BlockIds: TypeAlias = AnyInts  # numbers of blocks of the KV cache
Positions: TypeAlias = AnyInts  # indices of tokens in their request
TokenIds: TypeAlias = Int32s

NO_INTS: Ints = np.zeros(0, np.int64)
NO_INT32S: Int32s = np.zeros(0, np.int32)
NO_UINT8S: UInt8s = np.zeros(0, np.uint8)


def dtype_of(kind: Any) -> np.dtype[Any]:
    """Return the dtype of a column's type.

    kind: NDArray[scalar], which is ndarray[shape, dtype[scalar]]; since NumPy 2.5 it is an alias whose only argument is
    the scalar, and msgspec resolves it to that same ndarray.
    """
    *_, last = get_args(kind)
    *_, scalar = get_args(last) or (last,)
    dtype: np.dtype[Any] = np.dtype(scalar)
    return dtype
