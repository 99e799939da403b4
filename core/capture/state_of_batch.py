"""The fields that checkpoints store of objects in core/batch, core/kv, core/proposers and ipc: names by type.

A class also has the fields of its base classes. `_blocks` are the columns of a table; see ipc/tables/columns.py.
"""

from collections import deque
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from core.batch.batch import Batch
from core.batch.block_table import BlockTable, OtherKind
from core.batch.carried import Carried, Copies
from core.batch.forks import Forks
from core.batch.host_beside import HostBeside
from core.batch.host_cache import HostCache
from core.batch.index import RequestIndex
from core.batch.kept_states import KeptStates
from core.batch.prefix_cache import PrefixCache
from core.batch.request import Request
from core.batch.stop_check import StopCheck
from core.batch.table import BatchTable
from core.capture.state_types import Callback
from core.kv.beside import Beside
from core.kv.block_names import BlockNames
from core.kv.block_pool import BlockPool
from core.kv.block_ring import BlockRing
from core.kv.cache_kinds import CacheKind, CacheRoom
from core.kv.event_feed import KVFeed
from core.kv.event_log import KVEventLog
from core.kv.swap_space import SwapSpace
from core.proposers.gram_hash import GramHash
from core.proposers.ngram import NgramProposer
from core.proposers.offered import OfferedDrafts
from core.proposers.output_memory import OutputMemory
from core.proposers.suffix import SuffixProposer
from core.scheduling.adapter_slots import AdapterSlots
from core.scheduling.beams.beam_searches import BeamSearches
from core.scheduling.beams.group_rows import GroupRows
from core.scheduling.block_exchange import BlockExchange
from core.scheduling.encoder_inputs import EncoderInputs
from core.scheduling.pins.pins import Pins
from core.scheduling.whole_features import WholeFeatures
from ipc.tables.arrays import Bools, Int32s, Ints, UInt64s
from ipc.tables.paged_rows import PagedRows
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored

_Blocks = list[Annotated[NDArray[np.generic], 2]]
_LIMITS = (AdapterSlots, EncoderInputs, GroupRows, WholeFeatures)
_ON_RELEASE = Callback(tuple((kind, "give_back") for kind in _LIMITS))

FIELDS: dict[type, dict[Any, str]] = {
    Batch: {
        int: "block_size _shift",
        CacheRoom: "room",
        CacheKind: "first",
        tuple[OtherKind, ...]: "others",
        tuple[BlockTable, ...]: "tables",
        list[tuple[int, BlockTable]]: "_sliding",
        list[int]: "_widths",
        bool: "_tells_urgency",
        BatchTable: "table",
        BlockPool: "pool",
        PrefixCache: "prefix_cache",
        StopCheck: "stop_check",
        Ints: "rows",
        deque[tuple[int, Ints, Ints]]: "in_flight",
        Forks: "forks",
        Carried: "carried",
        KeptStates | None: "kept_states",
        list[Callback(((Pins, "take"),))]: "before_passed",  # type: ignore[misc]
        HostCache: "host_cache",
        list[Callback(((BeamSearches, "_leave"), (BlockExchange, "leave"), (Pins, "leave")))]: "before_release",  # type: ignore[misc]
        list[Pins]: "keepers",
        list[_ON_RELEASE]: "on_release",  # type: ignore[valid-type]
        list[Callback(((Batch, "copy_state"),))]: "on_copy",  # type: ignore[misc]
    },
    Carried: {
        list[int]: "removed_rows",
        dict[int, None]: "renewed_rows",
        Copies: "out within back states",
    },
    Forks: {
        int: "least_shared _block_size",
        bool: "is_off",
        tuple[BlockTable, ...]: "_tables",
        tuple[CacheKind, ...]: "_others",
        BlockPool: "_pool",
        PrefixCache: "_prefix_cache",
        deque[tuple[int, Ints, Ints]]: "_in_flight",
        list[tuple[list[Request], list[Int32s]]]: "kept",
    },
    HostCache: {
        int: "num_slots num_hits first _num_blank",
        Batch: "_batch",
        BlockNames: "names",
        tuple[HostBeside, ...]: "beside",
        BlockRing: "_ring",
        Ints: "times_given _blank",
        Bools: "is_busy",
        list[Ints]: "_pinned _written",
        Callback(((BlockExchange, "queue_stores"),), is_optional=True): "on_written",
    },
    HostBeside: {
        int: "page_blocks",
        Ints: "content",
        Annotated[Ints, 2]: "_slots_of",
        dict[int, int]: "_lead_of",
    },
    RequestIndex: {
        int: "_length",
        list[Request]: "_clients",
        list[tuple[int, int, Request]]: "_deadlines",
    },
    KeptStates: {
        BatchTable: "_table",
        BlockNames: "_names",
        list[int]: "_free",
        dict[int, int]: "_slots _pins",
        dict[int, None]: "_guesses _reserved",
        int: "_most_guesses num_slots",
        Ints: "content times_given saved_in",
    },
    PrefixCache: {
        int: "block_size _shift _num_pages",
        bool: "is_enabled",
        CacheRoom: "_room",
        BatchTable: "table",
        HostCache | None: "host",
        BlockNames: "_names",
        KeptStates | None: "kept_states",
    },
    StopCheck: {
        BatchTable: "_table",
        int: "_first_eos",
        list[int]: "_other_eos",
        Ints: "_keys",
    },
    BatchTable: {
        int: "_num_tenancies",
        PagedRows: "tokens",
        list[Request | None]: "request",
        list[int]: "_free_rows",
    },
    BlockTable: {
        _Blocks: "_blocks",
        PagedRows: "blocks",
    },
    PagedRows: {
        int: "page_size _shift _mask",
        Int32s: "_flat",
        Annotated[Ints, 2]: "_index",
        Ints: "_num_pages",
        list[int]: "_free",
    },
    BlockNames: {
        int: "block_size _num_contents",
        Ints: "content _parent",
        UInt64s: "_key",
        Annotated[Int32s, 2]: "_tokens",
        tuple[Beside, ...]: "beside",
        KVEventLog | None: "events",
    },
    Beside: {
        int: "page_blocks",
        Ints: "filled found owner",
        list[Ints]: "orphans",
    },
    BlockPool: {
        int: "num_blocks page_blocks _num_blank num_free num_fenced",
        BlockNames: "names",
        Int32s: "ref_count",
        Ints: "_blank _fence_of",
        NDArray[np.int8]: "urgency",
        list[BlockRing]: "_rings",
        deque[tuple[int, Ints]]: "_fenced",
        list[HostCache | BlockExchange | Pins]: "tiers",
    },
    BlockRing: {
        int: "_head _tail _length",
        Ints: "_entries _position",
    },
    KVFeed: {
        int: "_epoch",
        BlockNames: "_names",
        dict[int, int]: "_sequences",
        dict[int, None]: "_beginners",
    },
    KVEventLog: {
        int: "_block_size",
        list[KVBlocksStored | KVBlocksRemoved | KVBlocksCleared]: "_events",
    },
    SwapSpace: {
        int: "num_slots _num_free",
        Int32s: "_free",
        list[Int32s]: "_read",
    },
    GramHash: {
        int: "num_slots _num_shifted _key_factor",
        Ints: "lengths lanes back",
        Annotated[Bools, 2]: "is_beyond",
        UInt64s: "_factors",
        np.uint64: "_shift",
        list[int]: "_token_factors",
        tuple[int, ...]: "_lengths",
    },
    NgramProposer: {
        _Blocks: "_blocks",
        BatchTable: "_table",
        tuple[int, ...]: "_lengths",
        GramHash: "_hash",
        Annotated[Int32s, 2]: "_positions",
    },
    SuffixProposer: {
        _Blocks: "_blocks",
        BatchTable: "_table",
        NgramProposer: "_own",
        OutputMemory | None: "_memory",
        Ints: "_back",
        float: "_factor",
    },
    OutputMemory: {
        GramHash: "_hash",
        int: "_max_outputs _end",
        tuple[int, ...]: "_lengths",
        Int32s: "_tokens _begins _ends",
        Ints: "_scopes",
        Annotated[Int32s, 2]: "_positions",
        deque[tuple[int, int]]: "_outputs",
    },
    OfferedDrafts: {
        _Blocks: "_blocks",
        BatchTable: "_table",
        Annotated[Int32s, 2]: "_tokens",
        bool: "is_used",
        Ints: "_open",
    },
}
