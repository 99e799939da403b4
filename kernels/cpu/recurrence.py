"""CpuRecurrence: a layer with a recurrent state, with the C kernel (kernels/cpu/c/layers/recurrence.h)."""

import ctypes

import numpy as np

from kernels.arrays import Floats, Ints
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.mixer_structs import RecurrenceArguments, RecurrenceStepArguments
from kernels.elements import FLOAT32, Dtype, Numbers
from kernels.memory.aligned import aligned_empty
from kernels.recurrence import MAX_TAPS, MIXED_ROWS, RECURRENCES, RecurrenceParts, StateRows


class CpuRecurrence:
    """Computes what replaces attention in a layer, and updates the states of the requests.

    A request's tokens are computed one after the other. Their bits do not depend on the steps, the other requests or
    the threads.
    """

    def __init__(self, library: CpuLibrary, parts: RecurrenceParts, dtype: Dtype, offset: int) -> None:
        """Prepare the C struct.

        dtype: of the input and the result. offset: of the layer's state in a request's states.
        """
        sizes = parts.sizes
        assert 1 < sizes.taps <= MAX_TAPS, sizes
        assert sizes.key_dim % 2 == 0, sizes
        assert offset % 16 == 0, offset
        self.sizes, self.offset, self._dtype = sizes, offset, dtype
        arrays = parts.kernel, parts.bias, parts.rates, parts.step_biases, parts.skips, parts.norm
        self._kept = [None if one is None else np.ascontiguousarray(one, np.float32) for one in arrays]
        self.width = sum(sizes.parts)
        #: The C struct. It points into this object.
        self.arguments = RecurrenceArguments(
            *(None if one is None else one.ctypes.data for one in self._kept),
            channels=sizes.channels,
            width=self.width,
            state_offset=offset,
            kind=RECURRENCES.index(sizes.kind),
            dtype=ELEMENT_NUMBERS[dtype],
            taps=sizes.taps,
            num_heads=sizes.num_heads,
            num_groups=sizes.num_groups,
            takes_turns=sizes.takes_turns,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            eps=parts.eps,
            least_step=parts.steps[0],
            most_step=parts.steps[1],
            most_beta=parts.most_beta,
        )
        self._run = library.function("recurrence", ctypes.POINTER(RecurrenceStepArguments))

    def __call__(self, tokens: Numbers, positions: Ints, requests: StateRows) -> Numbers:
        """Return the results [T, out_width] for tokens [T, width] at these positions [T], which are contiguous.

        A request whose first token has position 0 starts with a state of zeros.
        """
        assert tokens.dtype == self._dtype, tokens.dtype
        assert tokens.flags.c_contiguous, tokens.strides
        assert tokens.shape == (requests.firsts[-1], self.width), (tokens.shape, requests.firsts)
        out = aligned_empty((len(tokens), self.sizes.out_width), self._dtype)
        mixed: Floats = aligned_empty((min(len(tokens), MIXED_ROWS), self.sizes.mixed_width), FLOAT32)
        self._run(
            RecurrenceStepArguments(
                ctypes.addressof(self.arguments),
                tokens.ctypes.data,
                out.ctypes.data,
                mixed.ctypes.data,
                requests.states.ctypes.data,
                requests.rows.ctypes.data,
                requests.firsts.ctypes.data,
                positions.ctypes.data,
                None if requests.saves is None else requests.saves.ctypes.data,
                requests.states.shape[1],
                mixed.shape[1],
                len(requests.rows),
            )
        )
        return out
