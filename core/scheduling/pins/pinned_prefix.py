"""PinnedPrefix: the first tokens of a prompt that are pinned, and PinLedger: what each tenant has pinned."""

from itertools import takewhile

import msgspec

from core.batch.request import Request
from core.kv.block_names import block_key
from ipc.tables.arrays import NO_INT32S, Int32s

#: A tenant's pins together have at most this many times the tokens of its share. Tokens in common are charged once, but
#: each pin keeps a list of its own.
MOST_REPEATED = 16


class PinnedPrefix(msgspec.Struct, eq=False):
    """Whole blocks from the start of a prompt, which a tenant has pinned until a time.

    blocks: of these, the first ones that the pin holds in the KV cache. num_kept: the most that it has held: these were
    promised. request: the last one that has asked for this pin; it computes what is missing.

    With layers with a window that have blocks of their own, or with recurrent ones, a request can start only with some
    numbers of first blocks. ends: these, ascending. kept_ends: when there were num_kept, which is the last of them.
    """

    tenant: str
    name: str  # "" = it is known by its tokens
    root: int
    token_ids: Int32s
    hashes: list[int]  # of its blocks
    keys: list[int]  # of its blocks, each from the key before it: equal keys, equal beginnings
    charged: list[int]  # the keys, and those of what its tenant is charged for in addition
    ends_ns: int  # on the clock of the step
    request: Request | None = None
    blocks: Int32s = msgspec.field(default_factory=lambda: NO_INT32S)
    num_kept: int = 0
    ends: list[int] = msgspec.field(default_factory=list)
    kept_ends: list[int] = msgspec.field(default_factory=list)
    #: For each further kind of layer: the block that it holds next to each of its blocks, NULL_BLOCK: none.
    others: list[Int32s] = msgspec.field(default_factory=list)
    states: dict[int, int] = msgspec.field(default_factory=dict)  # of the recurrent states it holds: end -> content

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return what another pin must have to replace this one."""
        return (self.tenant, self.name, 0 if self.name else self.keys[-1])

    def num_promised(self, num_blocks: int) -> int:
        """Return with how many first blocks a request can start that has num_blocks in common with the pin."""
        if not self.kept_ends:
            return min(num_blocks, self.num_kept)
        return max((end for end in self.kept_ends if end <= num_blocks), default=0)

    def keep_promise(self, num_kept: int, ends: list[int]) -> None:
        """Promise num_kept blocks from now on, if these are more. ends: see above."""
        if num_kept >= self.num_kept:
            self.num_kept, self.kept_ends = num_kept, ends


def keys_of(root: int, hashes: list[int]) -> list[int]:
    """Return a key for each block of a prefix, which stands for the block and all before it."""
    keys, key = list[int](), root
    for value in hashes:
        key = block_key(key, value)
        keys.append(key)
    return keys


def num_common(one: list[int], other: list[int]) -> int:
    """Return how many first blocks two prefixes have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class PinLedger:
    """How many different blocks each tenant has pinned. Tenants have no blocks in common: their roots differ.

    max_blocks: of all tenants. max_of_tenant: of each. size, noun: refusals call a block `size` of this.
    """

    def __init__(self, max_blocks: int, max_of_tenant: int, size: int, noun: str) -> None:
        self._size, self._noun = size, noun
        self.max_blocks, self.max_of_tenant = max_blocks, min(max_of_tenant, max_blocks)
        self.counts: dict[int, int] = {}  # by key: pins that have the block
        self._of_tenant: dict[str, int] = {}  # different blocks
        self._with_repeats: dict[str, int] = {}  # blocks of its pins, each as often as it occurs

    def __len__(self) -> int:
        """Return the number of different blocks."""
        return len(self.counts)

    def of_tenant(self, tenant: str) -> int:
        """Return how many different blocks a tenant has pinned."""
        return self._of_tenant.get(tenant, 0)

    def refusal(self, tenant: str, keys: list[int]) -> str:
        """Return the bound that these blocks of a tenant would exceed, or "" for none."""
        size, noun = self._size, self._noun
        new = sum(1 for key in keys if key not in self.counts)
        own = self.of_tenant(tenant)
        if own + new > self.max_of_tenant:
            return (
                f"this tenant has pinned {own * size} {noun}, the pin adds {new * size}, and its share is "
                f"{self.max_of_tenant * size} (max_tenant_pinned_share)"
            )
        if len(self) + new > self.max_blocks:
            return (
                f"{len(self) * size} {noun} are pinned, the pin adds {new * size}, and at most "
                f"{self.max_blocks * size} may be (max_pinned_share)"
            )
        listed, most = self._with_repeats.get(tenant, 0) + len(keys), MOST_REPEATED * self.max_of_tenant
        if listed > most:
            return (
                f"this tenant's pins would list {listed * size} {noun}, those in common as often as they occur, "
                f"and at most {most * size} are allowed: {MOST_REPEATED} times its share"
            )
        return ""

    def add(self, tenant: str, keys: list[int]) -> None:
        """Charge a tenant for a pin."""
        counts, new = self.counts, 0
        for key in keys:
            if key in counts:
                counts[key] += 1
            else:
                counts[key] = 1
                new += 1
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + new
        self._with_repeats[tenant] = self._with_repeats.get(tenant, 0) + len(keys)

    def remove(self, tenant: str, keys: list[int]) -> None:
        """Stop charging a tenant for a pin."""
        counts, gone = self.counts, 0
        for key in keys:
            if counts[key] > 1:
                counts[key] -= 1
            else:
                del counts[key]
                gone += 1
        self._of_tenant[tenant] -= gone
        self._with_repeats[tenant] -= len(keys)
        if not self._with_repeats[tenant]:
            del self._of_tenant[tenant], self._with_repeats[tenant]

    def clear(self) -> None:
        """Stop charging anything."""
        for one in (self.counts, self._of_tenant, self._with_repeats):
            one.clear()
