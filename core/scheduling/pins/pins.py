"""Pins: prefixes of prompts that tenants keep in the KV cache for a time. docs/pins.md has the contract.

A pin holds its blocks as a running request does: with a reference, so the pool cannot evict them. It takes them when
its request has computed them, or at once if they are there. Nothing else of the scheduler knows of pins; they are
called through the lists of callbacks that other parts use, from the first pin on.

With layers with a window that have their own blocks, or with recurrent layers, a pin also holds what a request needs
next to the blocks to start after the last one (core/scheduling/pins/pinned_beside.py).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from core.batch.request import NO_ROW, Request
from core.kv.block_names import hash_blocks
from core.kv.orders import Retain
from core.scheduling.block_exchange import BlockExchange
from core.scheduling.draft import Draft
from core.scheduling.ends import Ends
from core.scheduling.parts import SchedulerParts
from core.scheduling.pins.held_blocks import HeldBlocks
from core.scheduling.pins.pinned_beside import PinnedBeside, make_beside
from core.scheduling.pins.pinned_prefix import PinLedger, PinnedPrefix, keys_of, num_common
from ipc.tables.arrays import NO_INTS, BlockIds, Int32s, Ints, Rows
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
        num_pages, width = self._pool.num_blocks - 1, self._pool.page_blocks
        self._shares = (config.max_pinned_share, config.max_tenant_pinned_share)
        most, most_of_tenant = (int(share * num_pages) for share in self._shares)
        self.blocks = HeldBlocks(parts.batch, most, most_of_tenant)
        self.ledger = PinLedger(most * width, most_of_tenant * width, self._size, "tokens")
        self._beside: list[PinnedBeside] = []  # made with the first pin
        self._pins: dict[tuple[str, str, int], PinnedPrefix] = {}  # by identity
        self._live: list[PinnedPrefix] = []  # those whose requests are live
        self._first_end_ns = _NEVER
        self._now_ns = 0  # of the last step
        self._is_used = False  # whether there has been a pin

    def __len__(self) -> int:
        """Return the number of pins."""
        return len(self._pins)

    def __iter__(self) -> Iterator[PinnedPrefix]:
        """Return all pins, those of which nothing is in the cache included."""
        return iter(self._pins.values())

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
            source.charged,
            now_ns + message.ttl_ms * _NS_PER_MS,
            source.request,
        )
        refusal = self._put(pinned)
        pinned.keep_promise(source.num_kept, source.kept_ends)
        return (ErrorCode.PIN_REFUSED, refusal) if refusal else None

    def states(self, tenant: str, now_ns: int) -> tuple[list[PinState], int]:
        """Return a tenant's pins, and how many are left out."""
        own = [pinned for pinned in self._pins.values() if pinned.tenant == tenant and pinned.ends_ns > now_ns]
        listed = [
            PinState(
                pinned.name,
                len(pinned.token_ids),
                self._num_usable(pinned) * self._size,
                -(-(pinned.ends_ns - now_ns) // _NS_PER_MS),
            )
            for pinned in islice(own, MAX_LISTED_PINS)
        ]
        return listed, len(own) - len(listed)

    def _pin(self, pin: Pin, request: Request, now_ns: int) -> PinAnswer:
        """Pin the first tokens of a request that has arrived, and return the answer."""
        most = request.num_prompt_tokens - (1 if self._beside else 0)  # they cover no prompt's last token
        count = min(pin.num_tokens or most, most) // self._size
        if refusal := self._never_pins(count):
            self._stats.num_pins_refused += 1
            return PinAnswer(0, 0, refusal)
        hashes = request.block_hashes[:count]
        keys = keys_of(request.root, hashes)
        pinned = PinnedPrefix(
            request.tenant,
            pin.name,
            request.root,
            request.token_ids[: count * self._size].copy(),
            hashes,
            keys,
            self._charged(keys),
            now_ns + pin.ttl_ms * _NS_PER_MS,
            request,
        )
        # A prompt's last token is computed in any case.
        num_promised = min(self._num_promised(pinned), (request.num_prompt_tokens - 1) // self._size) * self._size
        if refusal := self._put(pinned):
            self._stats.num_pins_refused += 1
            return PinAnswer(0, num_promised, refusal)
        return PinAnswer(len(pinned.token_ids), num_promised)

    def _never_pins(self, num_blocks: int) -> str:
        """Return why this engine cannot pin so many whole blocks, or ""."""
        if not self._batch.prefix_cache.is_enabled:
            return "this engine has no prefix cache (enable_prefix_caching)"
        if not num_blocks:
            return f"it is shorter than a KV block of {self._size} tokens"
        return next((why for beside in self._beside if (why := beside.never_holds(num_blocks * self._size))), "")

    def _charged(self, keys: list[int]) -> list[int]:
        """Return the keys that a tenant is charged for."""
        more = [key for beside in self._beside for key in beside.charge(keys)]
        return keys + more if more else keys

    def _num_promised(self, new: PinnedPrefix) -> int:
        """Return how many first blocks of a new pin the pin that it replaces, or another without a name, has kept."""
        earlier = self._pins.get(new.identity)
        most = 0 if earlier is None else earlier.num_promised(num_common(new.keys, earlier.keys))
        for count in range(len(new.keys), most, -1):
            found = self._pins.get((new.tenant, "", new.keys[count - 1]))
            if found is not None:
                return max(most, found.num_promised(count))
        return most

    def _put(self, pinned: PinnedPrefix) -> str:
        """Add a pin, which replaces the one with its identity. Return the bound that it would exceed, or ""."""
        earlier = self._pins.get(pinned.identity)
        if earlier is not None:
            self._discharge(earlier)
        bounds = (ledger.refusal(pinned.tenant, keys) for ledger, keys in self._charges(pinned))
        if refusal := next(filter(None, bounds), ""):
            if earlier is not None:
                self._charge(earlier)
            return refusal
        self._charge(pinned)
        for beside in self._beside:
            beside.enter(pinned)
        self._hold(pinned)
        if earlier is not None:
            common = num_common(pinned.keys, earlier.keys)
            pinned.keep_promise(earlier.num_promised(common), [end for end in earlier.kept_ends if end <= common])
            self._let_go(earlier)
            self._drop(earlier)
        self._pins[pinned.identity] = pinned
        self._first_end_ns = min(self._first_end_ns, pinned.ends_ns)
        if pinned.request is not None:
            self._live.append(pinned)
        return ""

    # --- the blocks -----------------------------------------------------------------------------------------------

    def _charges(self, pinned: PinnedPrefix) -> list[tuple[PinLedger, list[int]]]:
        """Return what the tenant is charged for a pin, in each ledger."""
        return [(self.ledger, pinned.charged), *(one for beside in self._beside for one in beside.charges(pinned))]

    def _charge(self, pinned: PinnedPrefix) -> None:
        """Charge a tenant for a pin."""
        for ledger, keys in self._charges(pinned):
            ledger.add(pinned.tenant, keys)

    def _discharge(self, pinned: PinnedPrefix) -> None:
        """Stop charging a tenant for a pin."""
        for ledger, keys in self._charges(pinned):
            ledger.remove(pinned.tenant, keys)

    def _hold(self, pinned: PinnedPrefix, *, only_held: bool = False) -> None:
        """Hold those of a pin's next blocks that are there. only_held: no block may leave the free lists."""
        names, count, size = self._pool.names, len(pinned.blocks), self._size
        content = int(names.content[pinned.blocks[-1]]) if count else pinned.root
        found, _ = names.find(content, pinned.token_ids[count * size :].reshape(-1, size), pinned.hashes[count:])
        if only_held and len(found):
            held = self._pool.ref_count[found // self._pool.page_blocks] > 0
            found = found if held.all() else found[: int(held.argmin())]
        if len(found) and self.blocks.take(pinned.tenant, found):
            pinned.blocks = np.concatenate([pinned.blocks, found])
        if self._beside:
            first, *others = (beside.hold(pinned, only_held=only_held) for beside in self._beside)
            pinned.ends = [end for end in first if all(end in other for other in others)]
        pinned.keep_promise(self._num_usable(pinned), pinned.ends)

    def _num_usable(self, pinned: PinnedPrefix) -> int:
        """Return with how many of the blocks that a pin holds a request can start now."""
        return max(pinned.ends, default=0) if self._beside else len(pinned.blocks)

    def _drop(self, pinned: PinnedPrefix, count: int = 0) -> None:
        """Give up a pin's blocks, all but the first `count`."""
        for beside in self._beside:
            beside.drop(pinned, count)
        pinned.ends = [] if self._batch.others else [end for end in pinned.ends if end <= count]  # no window is left
        dropped, pinned.blocks = pinned.blocks[count:], pinned.blocks[:count]
        self.blocks.give(pinned.tenant, dropped)

    def _end(self, pinned: PinnedPrefix, *, is_over: bool) -> None:
        """Remove a pin. is_over: its time has come; otherwise the store beyond the host need not keep its blocks."""
        del self._pins[pinned.identity]
        self._discharge(pinned)
        if not is_over:
            self._let_go(pinned)
        self._drop(pinned)

    def _let_go(self, pinned: PinnedPrefix) -> None:
        """Tell the store beyond the host that it need not keep those blocks of a removed pin that no other pin has."""
        if self._exchange is not None:
            shared = num_common(pinned.keys, [key for key in pinned.keys if key in self.ledger.counts])
            self._retain(self._exchange, pinned, shared, 0)

    def _retain(self, exchange: BlockExchange, pinned: PinnedPrefix, first: int, ends_ns: int) -> None:
        """Tell the store beyond the host until when it should keep a pin's blocks, from this one on."""
        if len(pinned.blocks) > first:
            ttl_ms = max(0, ends_ns - self._now_ns) // _NS_PER_MS
            beside = [own.contents(pinned, first) for own in self._beside]
            contents = self._pool.names.content[pinned.blocks[first:]]
            exchange.orders.append(Retain(contents, ttl_ms, np.concatenate([NO_INTS, *beside])))

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
            self._beside = make_beside(self._batch, self.blocks, self._shares)
            self._batch.before_release.append(self.leave)
            self._batch.before_passed.append(self.take)
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
            if self._pins.get(pinned.identity) is not pinned:
                continue
            if request is None or request.is_finished:
                pinned.request = None
                for beside in self._beside:
                    beside.settle(pinned)
                continue
            if self._num_usable(pinned) < len(pinned.keys):
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

    def take(self, rows: Rows) -> None:
        """Hold what these rows have computed, before they free the blocks that their window has passed."""
        for pinned in self._computed_by(rows):
            if self._num_usable(pinned) < len(pinned.keys):
                self._hold(pinned)

    def leave(self, rows: Rows) -> None:
        """Hold what rows that are about to be released have computed, and have it kept beyond the host."""
        for pinned in self._computed_by(rows):
            self._hold(pinned, only_held=True)
            if self._exchange is not None:
                self._retain(self._exchange, pinned, 0, pinned.ends_ns)

    def _computed_by(self, rows: Rows) -> list[PinnedPrefix]:
        """Return the pins whose requests have one of these rows."""
        return [
            pinned
            for pinned in self._live
            if pinned.request is not None
            and pinned.request.row != NO_ROW
            and (rows == pinned.request.row).any()
            and self._pins.get(pinned.identity) is pinned
        ]

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
        pins = self._pins.values()
        beside = [blocks for own in self._beside for pinned in pins for blocks in own.held(pinned)]
        return [*(pinned.blocks for pinned in pins), *beside]

    def num_references(self, blocks: BlockIds) -> Ints:
        """Return how many pins hold each of these blocks [n]."""
        return self.blocks.num_references(blocks)

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
        for pinned in renamed:
            self._discharge(pinned)
        self._pins.clear()
        self.blocks.rename({pinned.tenant: word(pinned.tenant) for pinned in renamed})
        for pinned in renamed:
            pinned.tenant, pinned.name, pinned.root = word(pinned.tenant), word(pinned.name), root(pinned.root)
            pinned.token_ids = tokens(pinned.root, pinned.token_ids)
            pinned.hashes = hash_blocks(pinned.token_ids.reshape(-1, self._size)).tolist()
            pinned.keys = keys_of(pinned.root, pinned.hashes)
            pinned.charged = self._charged(pinned.keys)
            self._pins[pinned.identity] = pinned
            self._charge(pinned)


def _unknown(name: str) -> str:
    return f"there is no pin {name!r:.80}: it has ended, or was never made"
