"""The played store of KV blocks and recurrent states: it outlives the engines, and answers when the world lets it."""

from collections.abc import Callable, Sequence

from core.engine import EngineCore
from core.execution.shared_blocks import BlockMemory, SharedBlocks
from core.inputs import StoreNews
from core.kv.orders import Order
from core.tiers.block_file import BlockToLoad, BlockToStore
from core.tiers.block_store import BlockStore, StateContents
from core.tiers.connector import Tier
from core.tiers.portable_names import PortableNames
from tests.core.stateful_executor import StatefulExecutor
from tests.simulation.world import World

_KEY = bytes(range(32))


class BlockShelf:
    """A connector as it should be, in memory."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, bytes] = {}

    def open(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, are there."""
        return next((count for count, name in enumerate(names) if name not in self._blocks), len(names))

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        """Give these blocks."""
        for block in blocks:
            if (data := self._blocks.get(block.name)) is None:
                return
            block.take(data)

    def store(self, block: BlockToStore) -> bool:
        """Keep a block."""
        data = block.pack()
        if data is None or block.name in self._blocks:
            return False
        self._blocks[block.name] = bytes(data)
        return True


class PlayedStore:
    """An engine's thread of blocks, in the world's time. tell: gives the engine an answer."""

    def __init__(
        self,
        world: World,
        core: EngineCore,
        executor: StatefulExecutor,
        shelf: BlockShelf,
        tell: Callable[[StoreNews], None],
    ) -> None:
        self._world, self._tell = world, tell
        self._orders: list[Order] = []
        self._is_due = self.is_dead = False
        scheduler = core.scheduler
        self.exchange, kept, host = scheduler.exchange, scheduler.batch.kept_states, scheduler.batch.host_cache
        assert self.exchange is not None
        assert kept is not None
        size, contents = scheduler.batch.block_size, scheduler.pool.names.content
        cache, states = executor.kv.reshape(-1, size), executor.states[:, None]
        blocks = SharedBlocks(BlockMemory([cache]), BlockMemory([executor.host]), "played", BlockMemory([states]))
        self._store = BlockStore(
            [Tier("kv_dir", shelf, is_near=True)],
            PortableNames(_KEY, executor.info.fingerprint, size),
            blocks,
            contents,
            self.exchange.evictions,
            beside=StateContents(kept),
            on_host=lambda slot, content, is_beside: bool(host.names.content[slot - host.first] == content),
        )

    @property
    def is_idle(self) -> bool:
        """Return whether no order waits, and nothing is to be written."""
        return not self._orders and not self._store.has_unsaved

    def put(self, orders: Sequence[Order]) -> None:
        """Take a step's orders, and carry them out later."""
        self._orders += orders
        self._work_later()

    def _work_later(self) -> None:
        if not self._is_due and not self.is_idle:
            self._is_due = True
            self._world.after(self._world.delay(), self._work)

    def _work(self) -> None:
        """Carry out one order, or write one block if there is none."""
        self._is_due = False
        if self.is_dead:
            return
        answer = self._store.carry_out(self._orders.pop(0)) if self._orders else self._store.save_one()
        if answer is not None:
            self._tell(answer)
        self._work_later()
