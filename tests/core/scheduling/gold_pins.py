"""Pins once more, of plain lists: what a tenant keeps, until when, and who gives up first."""

from dataclasses import dataclass, field

from ipc.wire.pin_messages import Pin
from tests.core.scheduling.gold_entry import Block, Entry
from tests.core.scheduling.gold_scheduler import Gold
from tests.core.scheduling.gold_states import LEAST_TOKENS, GoldWithStates

_Part = tuple[str, tuple[int, ...]]  # the salt, and all tokens up to the end of a block


@dataclass(eq=False)
class GoldPin:
    tenant: str
    name: str
    salt: str
    tokens: list[int]
    ends: int
    size: int
    entry: Entry
    blocks: list[Block] = field(default_factory=list)
    kept: int = 0  # most blocks that it had, or that could be used
    kept_ends: list[int] = field(default_factory=list)  # with recurrent layers: those of the states that it had then
    states: dict[int, int] = field(default_factory=dict)  # that it has now: its blocks before one, and their name

    @property
    def parts(self) -> list[_Part]:
        ends = range(self.size, len(self.tokens) + 1, self.size)
        return [(self.salt, tuple(self.tokens[:end])) for end in ends]

    def promise(self, common: int) -> int:
        """Of so many first blocks."""
        return max(
            [end for end in self.kept_ends if end <= common] or [0 if self.kept_ends else min(common, self.kept)]
        )

    def keep(self, kept: int, ends: list[int]) -> None:
        if kept >= self.kept:
            self.kept, self.kept_ends = kept, ends

    @property
    def identity(self) -> tuple[str, str, _Part | None]:
        return (self.tenant, self.name, None if self.name else self.parts[-1])


class GoldWithPins(Gold):
    """What a pin holds has one more owner. It takes what is there when it comes, and after each step is planned; and
    what a row has when it leaves."""

    pins: dict[tuple[str, str, _Part | None], GoldPin]
    live: list[GoldPin]  # in the order in which they came

    def pin(self, asked: Pin, tenant: str, entry: Entry, now: int) -> tuple[int, int, bool]:
        """Tokens that are pinned and that were promised, and whether there is a bound."""
        self.expire(now)
        size, most = self.b.size, self.most_of(entry)
        whole = min(asked.num_tokens or most, most) // size * size
        if not self.c.enable_prefix_caching or whole < self.least:
            return 0, 0, True
        pin = GoldPin(tenant, asked.name, entry.salt, entry.tokens[:whole], now + asked.ttl_ms * 10**6, size, entry)
        promised = min(self.promised(pin), (entry.first - 1) // size) * size
        refused = self.put(pin)
        return (0 if refused else whole), promised, refused

    def fork(self, tenant: str, name: str, new_name: str, ttl_ms: int, now: int) -> bool | None:
        """False: there is no such pin. None: there is no room."""
        self.expire(now)
        source = self.pins.get((tenant, name, None))
        if source is None:
            return False
        pin = GoldPin(tenant, new_name, source.salt, source.tokens, now + ttl_ms * 10**6, source.size, source.entry)
        if self.put(pin):
            return None
        pin.keep(source.kept, source.kept_ends)
        return True

    def release_pin(self, tenant: str, name: str, now: int) -> bool:
        self.expire(now)
        pin = self.pins.pop((tenant, name, None), None)
        if pin is not None:
            self.drop(pin)
        return pin is not None

    def promised(self, new: GoldPin) -> int:
        """First blocks that an earlier pin has had: the one that is replaced, or the longest without a name."""
        found = [0]
        for pin in self.pins.values():
            common = sum(a == b for a, b in zip(pin.parts, new.parts, strict=False))
            if pin.identity == new.identity:
                found.append(pin.promise(common))
        unnamed = [pin for pin in self.pins.values() if pin.tenant == new.tenant and not pin.name]
        longer = [pin for pin in unnamed if len(pin.parts) > max(found) and pin.parts[-1] in new.parts]
        return max(
            [*found, *(pin.promise(len(pin.parts)) for pin in sorted(longer, key=lambda pin: -len(pin.parts))[:1])]
        )

    def put(self, pin: GoldPin) -> bool:
        """Whether a bound refuses it."""
        old = self.pins.get(pin.identity)
        others = [other for other in self.pins.values() if other is not old]
        own = [other for other in others if other.tenant == pin.tenant]
        usable = (self.c.num_blocks_override or 0) - 1
        most = int(self.c.max_pinned_share * usable)
        share = min(most, int(self.c.max_tenant_pinned_share * usable))
        if (
            len({part for other in [*own, pin] for part in other.parts}) > share
            or len({part for other in [*others, pin] for part in other.parts}) > most
            or sum(len(other.parts) for other in [*own, pin]) > 16 * share
        ):
            return True
        self.take_blocks(pin)
        if old is not None:
            common = sum(a == b for a, b in zip(pin.parts, old.parts, strict=False))
            pin.keep(old.promise(common), [end for end in old.kept_ends if end <= common])
            self.drop(old)
        self.pins[pin.identity] = pin
        self.live.append(pin)
        return False

    def take_blocks(self, pin: GoldPin, *, only_owned: bool = False) -> None:
        """Own the blocks that follow."""
        while len(pin.blocks) < len(pin.parts):
            name = pin.blocks[-1].name if pin.blocks else pin.salt
            block = self.b.names.get((name, pin.parts[len(pin.blocks)][1][-pin.size :]))
            if block is None or (only_owned and not block.owners):
                break
            self.b.cached = [other for other in self.b.cached if other is not block]
            self.b.fenced = [other for other in self.b.fenced if other is not block]
            block.owners += 1
            pin.blocks.append(block)
        self.look(pin)

    def look(self, pin: GoldPin) -> None:
        """What it has now may be more than ever."""
        pin.keep(len(pin.blocks), [])

    def most_of(self, entry: Entry) -> int:
        """Tokens of its prompt that may be pinned."""
        return entry.first

    @property
    def least(self) -> int:
        """Tokens that are worth a pin."""
        return 1

    def drop(self, pin: GoldPin) -> None:
        self.b.drop(pin.blocks, len(self.in_flight))
        pin.blocks = []
        self.b.lift(0)

    def expire(self, now: int) -> None:
        for pin in [pin for pin in self.pins.values() if pin.ends <= now]:
            del self.pins[pin.identity]
            self.drop(pin)

    def slid(self, r: Entry) -> None:
        """It gives back blocks that its window has passed."""
        for pin in self.live:
            if pin.entry is r and pin in self.pins.values() and not self.is_complete(pin):
                self.take_blocks(pin)

    def is_complete(self, pin: GoldPin) -> bool:
        return len(pin.blocks) == len(pin.parts)

    def guess(self) -> None:
        self.expire(self.now)
        there = list(self.pins.values())
        alive = self.running + self.waiting
        self.live = [pin for pin in self.live if pin in there and pin.entry in alive]
        for pin in self.live:
            if not self.is_complete(pin):
                self.take_blocks(pin)
        ready = self.running + [q for q in self.waiting if q.begun or not self.shut]
        if self.budget() and not any(r.n for r in self.running) and not self.in_flight and ready:
            holding = [pin for pin in self.pins.values() if pin.blocks]
            if holding:
                first = min(holding, key=lambda pin: pin.ends)
                self.drop(first)
                self.live = [pin for pin in self.live if pin is not first]
        super().guess()

    def about_to_leave(self, rows: list[Entry]) -> None:
        there = list(self.pins.values())
        for pin in self.live:
            if pin.entry in rows and pin in there:
                self.take_blocks(pin, only_owned=True)

    def forget(self) -> None:
        super().forget()
        for pin in self.pins.values():
            self.drop(pin)


class GoldWithStatePins(GoldWithPins, GoldWithStates):
    """A pin also has the last two recurrent states of its blocks, and a request stores one where its pins end."""

    def put(self, pin: GoldPin) -> bool:
        old = self.pins.get(pin.identity)
        others = [other for other in self.pins.values() if other is not old]
        own = [other for other in others if other.tenant == pin.tenant]
        most, share = self.bounds()
        if (
            len({part for other in [*own, pin] for part in other.parts[-2:]}) > share
            or len({part for other in [*others, pin] for part in other.parts[-2:]}) > most
            or sum(len(other.parts[-2:]) for other in [*own, pin]) > 16 * share
        ):
            return True
        before = list(pin.entry.wanted_places)
        pin.entry.wanted_places.append(len(pin.tokens))
        refused = super().put(pin)
        if refused:
            pin.entry.wanted_places = before
        return refused

    def bounds(self) -> tuple[int, int]:
        slots = self.b.most_slots
        most = int(self.c.max_pinned_share * slots)
        return most, min(most, int(self.c.max_tenant_pinned_share * slots))

    def look(self, pin: GoldPin) -> None:
        names = [block.name for block in pin.blocks]
        last = [end for end in range(1, len(names) + 1) if names[end - 1] in self.b.slots][-2:]
        self.lose(pin, last)
        for end in last:
            name = names[end - 1]
            if end not in pin.states and (name in self.b.pinned or len(set(self.b.pinned)) < self.bounds()[0]):
                pin.states[end] = name
                self.b.pinned.append(name)
                self.b.guesses = [guess for guess in self.b.guesses if guess != name]
        if pin.states:
            pin.keep(max(pin.states), sorted(pin.states))

    def lose(self, pin: GoldPin, kept: list[int]) -> None:
        for end in [end for end in pin.states if end not in kept]:
            self.b.pinned.remove(pin.states.pop(end))

    def drop(self, pin: GoldPin) -> None:
        self.lose(pin, [])
        super().drop(pin)

    def is_complete(self, pin: GoldPin) -> bool:
        return max(pin.states, default=0) == len(pin.parts)

    def most_of(self, entry: Entry) -> int:
        return entry.first - 1

    @property
    def least(self) -> int:
        return LEAST_TOKENS
