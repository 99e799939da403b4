"""Preemption: which rows are preempted, and how they resume: recomputed, or copied to the host and back."""

import numpy as np

from core.batch.request import Request, Swapped
from core.batch.table import RequestStart
from core.kv.swap_space import SwapSpace
from core.scheduling.decisions import Cause, Preempted
from core.scheduling.draft import Draft
from core.scheduling.parts import SchedulerParts
from core.scheduling.swapped_states import SwappedStates
from ipc.tables.arrays import NO_INT32S, Int32s, Ints, Rows


class Preemption:
    """Preemption of running rows, and the host's copies of their blocks.

    Costs are measured when the engine starts and fixed in its config, so that a log replays to the same decisions.
    """

    def __init__(self, parts: SchedulerParts) -> None:
        config = parts.config
        self._batch, self._waiting, self._policy, self._stats = parts.batch, parts.waiting, parts.policy, parts.stats
        self._mode = config.preemption_mode
        self._recompute_ns = config.recompute_ns_per_token
        self._swap_ns = 2 * config.swap_ns_per_block  # to the host and back
        self.swap_space = SwapSpace(0 if self._mode == "recompute" else config.num_swap_blocks)
        self.states: SwappedStates | None = None  # for a model with recurrent layers
        self.state_blocks = 0  # KV blocks with as many bytes as a state
        self.num_swapped = 0  # requests that wait with a copy on the host

    def victims_first(self, candidates: Ints) -> Ints:
        """Sort rows, given in the order in which they are served, with the best victim first.

        Keys: least valuable to the policy, then cheapest to restore, then served last.
        """
        if len(candidates) < 2:
            return candidates
        position = np.arange(len(candidates))
        victim_keys = self._policy.victim_keys(candidates)
        order = np.lexsort((-position, self._costs(candidates), *(-values for values in reversed(victim_keys))))
        return candidates[order]

    def preempt(self, draft: Draft, row: int, cause: Cause) -> None:
        """Preempt the row: its request waits again, in its former place in the queue.

        A token that a step in flight samples for it is dropped and sampled again: same ids and position, so the same
        token.
        """
        computed = int(self._batch.table.num_computed_tokens[row])
        self.undo_recompute_count(row)
        swapped = self._swap_out(row)
        request = self._batch.release_to_wait(row)
        request.swapped = swapped
        request.num_preemptions += cause is Cause.OLDER
        self._waiting.push(request)
        draft.drop(row)
        num_swapped = 0 if swapped is None else len(swapped.slots)
        self.num_swapped += swapped is not None
        draft.preempted.append(Preempted(request, cause, computed, num_swapped))
        self._stats.num_preemptions += 1
        self._stats.num_swapped_out_blocks += num_swapped

    def lose_all(self, requests: list[Request]) -> None:
        """Make all running rows wait, because the executor was lost with all blocks and the host's copies of them.

        requests: all live ones.
        """
        for row in self._batch.rows.tolist():
            self.undo_recompute_count(row)
            self._waiting.push(self._batch.release_to_wait(row))
        for request in requests:
            self.end(request)
        self._batch.forks.drop()
        self._batch.carried.forget_copies()
        self._batch.pool.forget()
        if (kept := self._batch.kept_states) is not None:
            kept.lose()

    def undo_recompute_count(self, row: int) -> None:
        """Uncount tokens that were counted as recomputed when the row started but that it has not reached."""
        table = self._batch.table
        missing = int(table.num_computed_before[row]) - int(table.num_computed_tokens[row])
        self._stats.num_recomputed_tokens -= max(0, missing)

    def end(self, request: Request) -> None:
        """Release the host's copy of a waiting request that has ended or is on hold."""
        if request.swapped is None:
            return
        self._batch.carried.out.drop(request.swapped.slots)  # if the copy is not in a plan yet
        self.swap_space.give_back(request.swapped.slots)
        if self.states is not None:
            self.states.space.give_back(request.swapped.states)
        request.swapped = None
        self.num_swapped -= 1

    def swap_in(self, start: RequestStart) -> None:
        """Copy a starting request's blocks back from the host, except those that the prefix cache has."""
        request = start.request
        if request.swapped is None:
            return
        slots = request.swapped.slots
        lacking, blocks = self._batch.blocks_to_fill(start, request.swapped.num_computed_tokens)
        if len(lacking):
            self._batch.carried.back.sources.append(slots[lacking])
            self._batch.carried.back.targets.append(blocks)
            self._stats.num_swapped_in_blocks += len(lacking)
        self.swap_space.give_back_after_plan(slots)
        if self.states is not None:
            self.states.space.give_back_after_plan(request.swapped.states)
            if start.num_computed_tokens == request.swapped.num_computed_tokens:  # otherwise a kept state is later
                start.swapped_state = int(request.swapped.states[0])
        request.swapped = None
        self.num_swapped -= 1

    def _swap_out(self, row: int) -> Swapped | None:
        """Copy the row's computed blocks to the host. Return None if the mode, the costs or lack of room forbid it.

        The last token is left out: the resumed request computes it in order to sample the next one.
        """
        table, request = self._batch.table, self._batch.table.request[row]
        assert request is not None, f"row {row} is to be preempted but is free"
        if request.is_whole:
            return None  # the hidden states of its first tokens are not copied
        params = request.sampling
        has_output = table.num_tokens[row] > table.num_prompt_tokens[row]
        if params is not None and params.prompt_logprobs is not None and not has_output:
            return None  # prompt logprobs of a step in flight would be lost; if recomputed, they are reported
        if request.searches:
            return None  # beams share blocks, and copies on the host would not
        kept = int(min(table.num_computed_tokens[row], table.num_tokens[row] - 1))
        blocks = self._batch.copied_blocks(row, kept)
        count = 0 if blocks is None else len(blocks)
        if blocks is None or not 0 < count <= self.swap_space.num_free or not self._prefers_swap(request, kept, count):
            return None
        states = self._copy_state(row, kept)
        if states is None:
            return None
        slots = self.swap_space.take(count)
        self._batch.carried.out.sources.append(blocks)
        self._batch.carried.out.targets.append(slots)
        return Swapped(slots, kept, states)

    def _copy_state(self, row: int, num_tokens: int) -> Int32s | None:
        """Copy the row's recurrent state, if the model has any, and return its slot; None if that is impossible."""
        if self.states is None:
            return NO_INT32S
        return self.states.take(row) if self.states.can_take(row, num_tokens) else None

    def end_plan(self) -> None:
        """Free what the finished plan reads."""
        self.swap_space.end_plan()
        if self.states is not None:
            self.states.space.end_plan()

    def check_integrity(self, requests: list[Request]) -> None:
        """Check that no slot is lost or held twice. Errors: AssertionError. requests: all live ones."""
        self.swap_space.check_integrity([one.swapped.slots for one in requests if one.swapped is not None])
        if self.states is not None:
            self.states.check_integrity(requests)

    def _prefers_swap(self, request: Request, num_tokens: int, num_blocks: int) -> bool:
        if self._mode == "by_choices":
            return bool(request.choices)
        copied = num_blocks + self.state_blocks
        return self._mode == "swap" or copied * self._swap_ns < num_tokens * self._recompute_ns

    def _costs(self, rows: Rows) -> Ints:
        """Return the cost of restoring each row, ns [n]."""
        computed = self._batch.table.num_computed_tokens[rows]
        again = computed * self._recompute_ns
        copied = (self._batch.num_copied(computed) + self.state_blocks) * self._swap_ns
        match self._mode:
            case "recompute":
                return again
            case "swap":
                return copied
            case "auto":
                return np.minimum(again, copied)
            case "by_choices":
                requests = [self._batch.table.request[row] for row in rows.tolist()]
                has_several = [request is not None and bool(request.choices) for request in requests]
                return np.where(has_several, copied, again)
