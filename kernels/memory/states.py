"""allocate_states: memory for the recurrent states of a batch's rows."""

from kernels.arrays import Floats
from kernels.elements import FLOAT32
from kernels.memory.shared_file import host_zeros


def allocate_states(num_rows: int, size: int) -> Floats:
    """Return the states [num_rows, size] float32 of num_rows rows. Their content is undefined.

    Pages cost nothing until they are written: a row that has never been used takes no memory.
    Errors: MemoryError with the sizes.
    """
    try:
        return host_zeros((num_rows, size), FLOAT32)
    except MemoryError as error:
        raise MemoryError(
            f"the recurrent states of {num_rows} rows need {num_rows * size * 4} bytes: {error}"
        ) from error
