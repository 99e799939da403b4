"""Type names of the kernels' NumPy columns; ipc/tables/arrays.py has those of the other packages."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

AnyInts: TypeAlias = NDArray[np.integer[Any]]
Ints: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]
UInt64s: TypeAlias = NDArray[np.uint64]
UInt32s: TypeAlias = NDArray[np.uint32]
UInt8s: TypeAlias = NDArray[np.uint8]
Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
