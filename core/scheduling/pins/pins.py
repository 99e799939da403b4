"""Pins: prefixes of prompts that tenants keep in the KV cache for a time. docs/pins.md has the contract.

A pin holds its blocks as a running request does: with a reference, so the pool cannot evict them. It takes them when
its request has computed them, or at once if they are there. Nothing else of the scheduler knows of pins; they are
called through the lists of callbacks that other parts use, from the first pin on.
"""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from core.batch.request import NO_ROW, Request
from core.kv.block_names import hash_blocks
from core.kv.orders import Retain
from core.scheduling.block_exchange import BlockExchange
from core.scheduling.draft import Draft
from core.scheduling.ends import Ends
from core.scheduling.parts import SchedulerParts
from core.scheduling.pins.pinned_prefix import PinLedger, PinnedPrefix, keys_of, num_common
from ipc.tables.arrays import BlockIds, Int32s, Ints, Rows
from ipc.wire.messages import ErrorCode
from ipc.wire.pin_messages import MAX_LISTED_PINS, ForkPin, Pin, PinAnswer, PinState

_NS_PER_MS = 1_000_000
_NEVER = 2**63 - 1


class Pins:
    """All pins of one scheduler.

    They may hold max_pinned_share of the KV cache, and those of one tenant max_tenant_pinned_share. If a request cannot
    run next to the pins although nothing else runs, pins give up their blocks, the one that ends first before others.
    """

    def __init__(
        self, parts: SchedulerParts, ends: Ends, cuts: list[Callable[[Draft], None]], exchange: BlockExchange | None
    ) -> None:
        config, self._batch, self._waiting, self._outputs = parts.config, parts.batch, parts.waiting, parts.outputs
        self._stats, self._ends, self._cuts, self._exchange = parts.stats, ends, cuts, exchange
        self._pool, self._size = parts.batch.pool, config.block_size
        num_usable = self._pool.num_blocks - 1
        self.ledger = PinLedger(
            int(config.max_pinned_share * num_usable), int(config.max_tenant_pinned_share * num_usable)
        )
        self._pins: dict[tuple[str, str, int], PinnedPrefix] = {}  # by identity
        self._references: Ints = np.zeros(self._pool.num_blocks, np.int64)  # how many pins hold each block
        self._live: list[PinnedPrefix] = []  # those whose requests are live
        self._first_end_ns = _NEVER
        self._now_ns = 0  # of the last step
        self._is_used = False  # whether there has been a pin

    def __len__(self) -> int:
        """Return the number of pins."""
        return len(self._pins)

    # --- what requests and calls ask for --------------------------------------------------------------------------

    def enter(self, pin: Pin, choices: Sequence[Request], now_ns: int) -> None:
        """Pin what a message that has arrived asks for, and answer. choices: its live ones; without any, do nothing."""
        for request in choices:
            request.pins = ()
        if not choices or choices[0].is_finished:  # all of its tokens were delivered, or another pin has failed it
            return
        self._begin(now_ns)
        request, answer = choices[0], self._pin(pin, choices[0], now_ns)
        if answer.refusal and pin.is_required:
            self._ends.fail(request, ErrorCode.PIN_REFUSED, f"the prompt cannot be pinned: {answer.refusal}")
        else:
            self._outputs.add_pinned(request.client, request.number, answer)

    def release(self, tenant: str, name: str, now_ns: int) -> str:
        """End a named pin. Return why that is not possible, or ""."""
        self._begin(now_ns)
        pinned = self._pins.get((tenant, name, 0))
        if pinned is None:
            return _unknown(name)
        self._end(pinned, is_over=False)
        return ""

    def fork(self, message: ForkPin, now_ns: int) -> tuple[ErrorCode, str] | None:
        """Pin what a named pin has under another name too. Return why that is not possible, or None."""
        self._begin(now_ns)
        source = self._pins.get((message.tenant, message.name, 0))
        if source is None:
            return ErrorCode.INVALID_ARGUMENT, _unknown(message.name)
        pinned = PinnedPrefix(
            source.tenant,
            message.new_name,
            source.root,
            source.token_ids,
            source.hashes,
            source.keys,
            now_ns + message.ttl_ms * _NS_PER_MS,
            source.request,
        )
        refusal = self._put(pinned)
        pinned.num_kept = max(pinned.num_kept, source.num_kept)
        return (ErrorCode.PIN_REFUSED, refusal) if refusal else None

    def states(self, tenant: str, now_ns: int) -> tuple[list[PinState], int]:
        """Return a tenant's pins, and how many are left out."""
        own = [pinned for pinned in self._pins.values() if pinned.tenant == tenant and pinned.ends_ns > now_ns]
        listed = [
            PinState(
                pinned.name,
                len(pinned.token_ids),
                len(pinned.blocks) * self._size,
                -(-(pinned.ends_ns - now_ns) // _NS_PER_MS),
            )
            for pinned in islice(own, MAX_LISTED_PINS)
        ]
        return listed, len(own) - len(listed)

    def _pin(self, pin: Pin, request: Request, now_ns: int) -> PinAnswer:
        """Pin the first tokens of a request that has arrived, and return the answer."""
        count = min(pin.num_tokens or request.num_prompt_tokens, request.num_prompt_tokens) // self._size
        if refusal := self._never_pins(count):
            self._stats.num_pins_refused += 1
            return PinAnswer(0, 0, refusal)
        hashes = request.block_hashes[:count]
        pinned = PinnedPrefix(
            request.tenant,
            pin.name,
            request.root,
            request.token_ids[: count * self._size].copy(),
            hashes,
            keys_of(request.root, hashes),
            now_ns + pin.ttl_ms * _NS_PER_MS,
            request,
        )
        num_promised = self._num_promised(pinned) * self._size
        if refusal := self._put(pinned):
            self._stats.num_pins_refused += 1
            return PinAnswer(0, num_promised, refusal)
        return PinAnswer(len(pinned.token_ids), num_promised)

    def _never_pins(self, num_blocks: int) -> str:
        """Return why this engine cannot pin so many whole blocks, or ""."""
        if not self._batch.prefix_cache.is_enabled:
            return "this engine has no prefix cache (enable_prefix_caching)"
        if self._batch.others or self._batch.kept_states is not None:
            return "this model's layers do not share their KV blocks, or have recurrent states, which are not pinned"
        return "" if num_blocks else f"it is shorter than a KV block of {self._size} tokens"

    def _num_promised(self, new: PinnedPrefix) -> int:
        """Return how many first blocks of a new pin the pin that it replaces, or another without a name, has kept."""
        earlier = self._pins.get(new.identity)
        most = 0 if earlier is None else min(num_common(new.keys, earlier.keys), earlier.num_kept)
        for count in range(len(new.keys), most, -1):
            found = self._pins.get((new.tenant, "", new.keys[count - 1]))
            if found is not None:
                return max(most, found.num_kept)
        return most

    def _put(self, pinned: PinnedPrefix) -> str:
        """Add a pin, which replaces the one with its identity. Return the bound that it would exceed, or ""."""
        earlier, ledger = self._pins.get(pinned.identity), self.ledger
        if earlier is not None:
            ledger.remove(earlier.tenant, earlier.keys)
        refusal = ledger.refusal(pinned.tenant, pinned.keys, self._size)
        if refusal:
            if earlier is not None:
                ledger.add(earlier.tenant, earlier.keys)
            return refusal
        ledger.add(pinned.tenant, pinned.keys)
        self._hold(pinned)
        if earlier is not None:
            pinned.num_kept = max(pinned.num_kept, min(num_common(pinned.keys, earlier.keys), earlier.num_kept))
            self._let_go(earlier)
            self._drop(earlier)
        self._pins[pinned.identity] = pinned
        self._first_end_ns = min(self._first_end_ns, pinned.ends_ns)
        if pinned.request is not None:
            self._live.append(pinned)
        return ""

    # --- the blocks -----------------------------------------------------------------------------------------------

    def _hold(self, pinned: PinnedPrefix, *, only_held: bool = False) -> None:
        """Hold those of a pin's next blocks that are there. only_held: no block may leave the free lists."""
        names, count, size = self._pool.names, len(pinned.blocks), self._size
        content = int(names.content[pinned.blocks[-1]]) if count else pinned.root
        found, _ = names.find(content, pinned.token_ids[count * size :].reshape(-1, size), pinned.hashes[count:])
        if only_held and len(found):
            held = self._pool.ref_count[found] > 0
            found = found if held.all() else found[: int(held.argmin())]
        if len(found):
            self._pool.hold(found)
            self._references[found] += 1
            pinned.blocks = np.concatenate([pinned.blocks, found])
            pinned.num_kept = max(pinned.num_kept, len(pinned.blocks))

    def _drop(self, pinned: PinnedPrefix, count: int = 0) -> None:
        """Give up a pin's blocks, all but the first `count`."""
        in_flight = self._batch.in_flight
        dropped, pinned.blocks = pinned.blocks[count:], pinned.blocks[:count]
        if len(dropped):
            self._references[dropped] -= 1
            self._pool.free(dropped[::-1], in_flight[-1][0] if in_flight else None)

    def _end(self, pinned: PinnedPrefix, *, is_over: bool) -> None:
        """Remove a pin. is_over: its time has come; otherwise the store beyond the host need not keep its blocks."""
        del self._pins[pinned.identity]
        self.ledger.remove(pinned.tenant, pinned.keys)
        if not is_over:
            self._let_go(pinned)
        self._drop(pinned)

    def _let_go(self, pinned: PinnedPrefix) -> None:
        """Tell the store beyond the host that it need not keep those blocks of a removed pin that no other pin has."""
        if self._exchange is not None:
            shared = num_common(pinned.keys, [key for key in pinned.keys if key in self.ledger.counts])
            self._retain(self._exchange, pinned.blocks[shared:], 0)

    def _retain(self, exchange: BlockExchange, blocks: Int32s, ends_ns: int) -> None:
        """Tell the store beyond the host until when it should keep these blocks."""
        if len(blocks):
            ttl_ms = max(0, ends_ns - self._now_ns) // _NS_PER_MS
            exchange.orders.append(Retain(self._pool.names.content[blocks], ttl_ms))

    def _end_overdue(self, now_ns: int) -> None:
        """Remove the pins whose time has come."""
        self._now_ns = now_ns
        if now_ns < self._first_end_ns:
            return
        for pinned in [pinned for pinned in self._pins.values() if pinned.ends_ns <= now_ns]:
            self._end(pinned, is_over=True)
        self._first_end_ns = min((pinned.ends_ns for pinned in self._pins.values()), default=_NEVER)

    def _begin(self, now_ns: int) -> None:
        """Prepare for a change between two steps. The first one makes the other parts call this one."""
        if not self._is_used:
            self._is_used = True
            self._cuts.append(self.cut)
            self._batch.before_release.append(self.leave)
            self._batch.keepers.append(self)
            self._pool.tiers.append(self)
        self._end_overdue(now_ns)

    # --- in a step ------------------------------------------------------------------------------------------------

    def cut(self, draft: Draft) -> None:
        """Hold what has been computed, by whichever request, and end what is over. Call this when a draft is filled."""
        self._end_overdue(draft.now_ns)
        live, self._live = self._live, []
        for pinned in live:
            request = pinned.request
            if request is None or request.is_finished or self._pins.get(pinned.identity) is not pinned:
                pinned.request = None
                continue
            if not pinned.is_whole:
                self._hold(pinned)
            self._live.append(pinned)
        if draft.budget and not draft.starts and not draft.counts.any() and not self._batch.in_flight:
            self._yield()

    def _yield(self) -> None:
        """Give up the blocks of one pin if requests could run and none does: they lack blocks.

        It holds none again before another request asks for it: otherwise pins could take turns forever.
        """
        if not len(self._batch) and not self._waiting.num_ready:
            return
        holding = [pinned for pinned in self._pins.values() if len(pinned.blocks)]
        if holding:
            self._stats.num_pins_yielded += 1
            first = min(holding, key=lambda pinned: pinned.ends_ns)
            self._drop(first)
            first.request = None

    def leave(self, rows: Rows) -> None:
        """Hold what rows that are about to be released have computed, and have it kept beyond the host."""
        for pinned in self._live:
            request = pinned.request
            if request is None or request.row == NO_ROW or not (rows == request.row).any():
                continue
            if self._pins.get(pinned.identity) is pinned:
                self._hold(pinned, only_held=True)
                if self._exchange is not None:
                    self._retain(self._exchange, pinned.blocks, pinned.ends_ns)

    # --- as a tier of the pool, and as a keeper of the batch ------------------------------------------------------

    def keep(self, pages: Ints) -> None:
        """Do nothing with evicted pages, which are never those of pins."""

    def forget(self) -> None:
        """Give up all blocks: the cache was emptied. The promises remain."""
        for pinned in self._pins.values():
            self._drop(pinned)

    def forget_contents(self, contents: Ints) -> None:
        """Give up blocks that are about to lose their names, and those that follow them."""
        for pinned in self._pins.values():
            lost = np.isin(self._pool.names.content[pinned.blocks], contents)
            if lost.any():
                self._drop(pinned, int(lost.argmax()))

    def held(self) -> list[Int32s]:
        """Return the blocks of all pins."""
        return [pinned.blocks for pinned in self._pins.values()]

    def num_references(self, blocks: BlockIds) -> Ints:
        """Return how many pins hold each of these blocks [n]."""
        counts: Ints = self._references[blocks]
        return counts

    def num_held_blocks(self) -> int:
        """Return how many different blocks pins hold."""
        return int(np.count_nonzero(self._references))

    # --- redaction ------------------------------------------------------------------------------------------------

    def rename(
        self,
        root: Callable[[int], int],
        tokens: Callable[[int, Int32s], Int32s],
        word: Callable[[str], str],
    ) -> None:
        """Rename the roots, tokens, tenants and names of all pins.

        tokens: maps (new root, tokens) to the new tokens.
        """
        renamed = list(self._pins.values())
        self._pins.clear()
        self.ledger.clear()
        for pinned in renamed:
            pinned.tenant, pinned.name, pinned.root = word(pinned.tenant), word(pinned.name), root(pinned.root)
            pinned.token_ids = tokens(pinned.root, pinned.token_ids)
            pinned.hashes = hash_blocks(pinned.token_ids.reshape(-1, self._size)).tolist()
            pinned.keys = keys_of(pinned.root, pinned.hashes)
            self._pins[pinned.identity] = pinned
            self.ledger.add(pinned.tenant, pinned.keys)


def _unknown(name: str) -> str:
    return f"there is no pin {name!r:.80}: it has ended, or was never made"
