"""SecondForms: forms of matrices that are packed after the model is in use (docs/weights.md)."""

import threading
from collections import deque
from typing import Protocol

from kernels.cpu.gemm import SecondForm
from kernels.cpu.packed_weights import PackedWeights
from kernels.memory.aligned import ALIGNMENT
from kernels.memory.weight_memory import Room
from kernels.rounding import round_up


class PackSecond(Protocol):
    """Packs one form, in this room if it is large enough."""

    def __call__(self, *, room: Room | None) -> PackedWeights:
        """Return the weights."""


class SecondForms:
    """Those of one model. One thread calls add(), then pack_next(), and the one that runs steps take_up() and drop().

    room: memory for them. num_bytes: about those of the model's matrices in all forms.
    """

    def __init__(self, room: Room | None = None, num_bytes: int = 0) -> None:
        self._room, self._num_expected, self._num_packed = room, num_bytes, 0
        self._waiting = deque[tuple[SecondForm, PackSecond]]()
        self._packed = list[tuple[SecondForm, PackedWeights]]()
        self._lock = threading.Lock()
        self._are_all_here, self._are_ready, self._are_dropped = True, False, False

    def add(self, pack: PackSecond) -> SecondForm:
        """Return a form that is packed later."""
        form, self._are_all_here = SecondForm(), False
        self._waiting.append((form, pack))
        return form

    def total_bytes(self, num_bytes: int) -> int:
        """Return the bytes of the model's matrices in all forms, about so many if some are not packed.

        num_bytes: in the first form.
        """
        packed = num_bytes + self._num_packed
        return packed if self._are_all_here else max(packed, self._num_expected)

    def pack_next(self) -> bool:
        """Pack one form, and return whether there are more. Errors: MemoryError; then the others are not packed."""
        with self._lock:
            if not self._waiting:
                return False
            (form, pack), room = self._waiting.popleft(), self._room
        weights: PackedWeights | None = None
        try:
            weights = pack(room=room)
        finally:
            with self._lock:
                if weights is None:
                    self._waiting.clear()
                elif not self._are_dropped:
                    self._packed.append((form, weights))
                    self._num_packed += round_up(weights.packed.nbytes, ALIGNMENT)
                    self._are_all_here = not self._waiting
                if not self._waiting:
                    self._room, self._are_ready = None, True
        return bool(self._waiting)

    def take_up(self) -> None:
        """Compute with all forms from the next product on, once they are packed. No product is being computed."""
        if self._are_ready:
            for form, weights in self._packed:
                form.use(weights)
            self._packed.clear()
            self._are_ready = False

    def drop(self) -> None:
        """Drop what is not taken up, with its memory."""
        with self._lock:
            self._waiting.clear()
            self._packed.clear()
            self._room, self._are_dropped = None, True
