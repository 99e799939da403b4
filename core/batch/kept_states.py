"""KeptStates: recurrent states at the ends of blocks, from which later requests with the same tokens can continue.

Like a block's K and V, a state is a function of the tokens before it. So it is identified by the number of the block's
content (core/kv/block_names.py), which is never reused. The slots of the states come after those of the rows.

A step stores states while it computes a prompt, at these places, each the end of a block:

- where the prompt leaves what the prefix cache knows: other prompts have the same beginning;
- at the prompt's last whole block, where the conversation's next turn continues;
- at places where a later prompt may leave this one: one block before the last whole one, because chat templates often
  end a prompt with tokens that the next turn does not repeat, and at multiples of a distance that depends only on the
  prompt's length. These are guesses;
- at the last whole block of a step that leaves known tokens for the next one, so that a request that is preempted after
  every step still gets on. These count as guesses, too;
- where a pin of the prompt ends.

If no slot is free, a new state replaces the least recently used one that no pin holds. Guesses have at most half of the
slots, so one long prompt does not replace the states of all others. A guess from which a request has started, or that a
pin holds, is no guess any more.
"""

from collections.abc import Sequence

import numpy as np

from core.batch.carried import Carried
from core.batch.table import BatchTable, RequestStart
from core.execution.plan import NONE_SAVED, SavedStates
from core.execution.state_slots import MOST_GUESSES
from core.kv.block_names import UNNAMED, BlockNames
from ipc.tables.arrays import Bools, Int32s, Ints, Rows

#: A state after fewer tokens is not kept: to compute these again costs about as much as a step.
LEAST_TOKENS = 64
#: The least distance of two guesses, in tokens.
_LEAST_DISTANCE = 128


class KeptStates:
    """The slots of kept states, by the content that ends there, least recently used first."""

    def __init__(self, table: BatchTable, names: BlockNames, num_rows: int, num_slots: int) -> None:
        """num_rows: number of state slots that belong to rows and come first."""
        self._table, self._names = table, names
        self._free = list(range(num_rows + num_slots - 1, num_rows - 1, -1))
        self._slots: dict[int, int] = {}
        self._guesses: dict[int, None] = {}  # contents in _slots that are guesses, oldest first
        self._most_guesses = num_slots // 2
        self.num_slots = num_slots
        self._pins: dict[int, int] = {}  # how many pins hold the state of a content, which is then not replaced
        #: For a store beyond the host, by slot: the content that a state belongs to, and how often the slot has been
        #: given to another state; and the step that stores it.
        self.content: Ints = np.zeros(num_rows + num_slots, np.int64)
        self.times_given: Ints = np.zeros(num_rows + num_slots, np.int64)
        self.saved_in: Ints = np.zeros(num_rows + num_slots, np.int64)
        self._reserved: dict[int, None] = {}

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._slots)

    def reachable(self, contents: Ints) -> int:
        """Return how many of these consecutive contents of a request's blocks end at the last one that has a state."""
        numbers = contents.tolist()
        return next((count for count in range(len(numbers), 0, -1) if numbers[count - 1] in self._slots), 0)

    def begin(self, starts: Sequence[RequestStart], host_names: BlockNames, carried: Carried) -> None:
        """Copy the states after the first blocks of starting requests, of the cache or of the host, to their rows."""
        for start in starts:
            if (start.num_hits or start.num_loaded) and start.swapped_state is None:
                content = int(self._names.content[start.hits[-1]]) if not start.num_loaded else 0
                if start.host_slots is not None and start.num_loaded:
                    content = int(host_names.content[start.host_slots[-1]])
                slot = self._slots[content] = self._slots.pop(content)  # moves it to the end: the most recent one
                self._guesses.pop(content, None)
                carried.states.add(slot, start.request.row)

    def save(self, rows: Rows, counts: Ints) -> SavedStates:
        """Choose the states that the step being planned stores, and return them.

        rows [R]: the plan's. counts [R]: known tokens that they compute in the step, already counted as computed. Later
        plans may start requests with these states; a state that this plan copies is read before the step writes.
        """
        table, saved = self._table, list[tuple[int, int, int]]()
        begins = table.num_computed_tokens[rows] - counts
        for index in np.flatnonzero(begins < table.num_prompt_tokens[rows] - 1).tolist():
            row, begin = int(rows[index]), int(begins[index])
            for place, is_guess in self._places(row, begin, begin + int(counts[index])).items():
                slot = self._slot_of(self._content(row, place), is_guess)
                if slot is not None:
                    saved.append((index, place - begin, slot))
        if not saved:
            return NONE_SAVED
        latest = {slot: (index, after) for index, after, slot in saved}  # few slots: a later state replaces it
        return SavedStates(*np.array([(*where, slot) for slot, where in latest.items()], np.int32).T.copy())

    def _places(self, row: int, begin: int, end: int) -> dict[int, bool]:
        """Return the places after `begin`, up to `end`, where the row's prompt has a state; and whether it is a guess.

        A place is a number of tokens.
        """
        size, request = self._names.block_size, self._table.request[row]
        assert request is not None, f"row {row} is free"
        length = int(self._table.num_prompt_tokens[row])
        last, known = (length - 1) // size * size, request.known_end
        places: dict[int, bool] = {}
        if self._most_guesses:
            distance = max(size, _LEAST_DISTANCE)
            while length > distance * min(self._most_guesses, MOST_GUESSES):
                distance *= 2
            first = (begin // distance + 1) * distance
            guesses = range(first, min(end, last - LEAST_TOKENS) + 1, distance)
            places = dict.fromkeys((place for place in guesses if abs(place - known) >= LEAST_TOKENS), True)
            places[last - size] = True
        places |= {known: False, last: False, **dict.fromkeys(request.state_places, False)}
        chosen = {at: places[at] for at in sorted(places) if begin < at <= end and LEAST_TOKENS <= at <= last}
        if end < self._table.num_tokens[row] and begin < (whole := end // size * size) <= last:
            chosen.setdefault(whole, self._most_guesses > 0)
        return chosen

    def _content(self, row: int, place: int) -> int:
        """Return the number of the content of the row's first `place` tokens, whole blocks; UNNAMED: it has none."""
        table, count = self._table, place // self._names.block_size
        block = table.blocks.read(row, count - 1, count)
        if content := int(self._names.content[block][0]):
            return content
        request = table.request[row]  # another block has the content, because both were computed
        assert request is not None, f"row {row} is free"
        token_ids = table.tokens.read(row, 0, place).reshape(count, -1)
        found, content = self._names.find(request.root, token_ids, request.block_hashes[:count])
        return content if len(found) == count else UNNAMED

    def _slot_of(self, content: int, is_guess: bool) -> int | None:
        """Return a slot for the state of a content; None: it is kept already, has no name, or pins hold all."""
        if content == UNNAMED:
            return None
        if content in self._slots:
            self._slots[content] = self._slots.pop(content)
            if not is_guess:
                self._guesses.pop(content, None)
            return None
        if is_guess and len(self._guesses) >= self._most_guesses:
            slot = self._drop(next(iter(self._guesses)))
        elif (taken := self._take()) is not None:
            slot = taken
        else:
            return None
        self._slots[content] = slot
        self._give(slot, content)
        if is_guess:
            self._guesses[content] = None
        return slot

    def _take(self) -> int | None:
        """Return a free slot, or that of the least recently used state that no pin holds."""
        if self._free:
            return self._free.pop()
        oldest = next((content for content in self._slots if content not in self._pins), None)
        return None if oldest is None else self._drop(oldest)

    def _give(self, slot: int, content: int) -> None:
        self.content[slot] = content
        self.times_given[slot] += 1

    def _drop(self, content: int) -> int:
        """Forget the state of a content, and return its slot."""
        self._guesses.pop(content, None)
        slot = self._slots.pop(content)
        self.content[slot] = UNNAMED
        return slot

    def lose(self) -> None:
        """Let no store read a state that is there now: the memory is lost. Its content is not found again."""
        self.times_given += 1

    # --- pins -----------------------------------------------------------------------------------------------------

    def last_ends(self, contents: Ints, most: int) -> list[int]:
        """Return after how many of these consecutive contents there are states: the last ones, at most so many."""
        numbers, ends = contents.tolist(), list[int]()
        for count in range(len(numbers), 0, -1):
            if len(ends) == most:
                break
            if numbers[count - 1] in self._slots:
                ends.append(count)
        return ends

    def pin(self, content: int, most: int) -> bool:
        """Hold the state of a content until unpin(). Return False if more than `most` would be held."""
        if content not in self._pins and len(self._pins) >= most:
            return False
        self._pins[content] = self._pins.get(content, 0) + 1
        self._guesses.pop(content, None)
        return True

    def unpin(self, content: int) -> None:
        """Drop one hold of a state."""
        self._pins[content] -= 1
        if not self._pins[content]:
            del self._pins[content]

    # --- stores beyond the host -----------------------------------------------------------------------------------

    def has(self, contents: Ints) -> Bools:
        """Return for which of these contents there is a state, bool [n]."""
        return np.array([content in self._slots for content in contents.tolist()], np.bool_)

    def to_store(self, contents: Ints) -> Int32s:
        """Return the slots of the states of a request's contents that later requests may want; 0 for the others.

        These are all but guesses, and the last guess.
        """
        known = [(place, content) for place, content in enumerate(contents.tolist()) if content in self._slots]
        guesses = [content for _, content in known if content in self._guesses]
        slots = np.zeros(len(contents), np.int32)
        for place, content in known:
            if content not in guesses[:-1]:
                slots[place] = self._slots[content]
        return slots

    def reserve(self, count: int) -> Ints | None:
        """Take slots, to be written from outside until release().

        None if more than half of all would be taken, or some that pins hold.
        """
        num_free = len(self._slots) + len(self._free) - len(self._pins)
        if count and (len(self._reserved) + count > self.num_slots // 2 or count > num_free):
            return None
        slots = [slot for _ in range(count) if (slot := self._take()) is not None]
        for slot in slots:
            self._give(slot, UNNAMED)
        self._reserved |= dict.fromkeys(slots)
        return np.array(slots, np.int64)

    def put(self, contents: Ints, slots: Ints) -> None:
        """Let requests start from the states that have been written to these reserved slots."""
        for content, slot in zip(contents.tolist(), slots.tolist(), strict=True):
            del self._reserved[slot]
            self._slots[content] = slot
            self.content[slot] = content

    def release(self, slots: Ints) -> None:
        """Free those of these reserved slots that have no state."""
        for slot in slots.tolist():
            if slot in self._reserved:
                del self._reserved[slot]
                self._free.append(slot)

    def check_integrity(self) -> None:
        """Check that no slot has two states, and that guesses have states. Errors: AssertionError."""
        slots = [*self._slots.values(), *self._free, *self._reserved]
        assert len(slots) == len(dict.fromkeys(slots)), f"slots of states: {slots}"
        assert self._guesses.keys() <= self._slots.keys(), f"guesses without states: {self._guesses}"
        assert len(self._guesses) <= self._most_guesses, f"{len(self._guesses)} guesses"
        assert self._pins.keys() <= self._slots.keys() - self._guesses.keys(), f"pins of no state: {self._pins}"
