"""The fields that checkpoints store of objects in core/scheduling: names by type.

A class also has the fields of its base classes. `_blocks` are the columns of a table; see ipc/tables/columns.py.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from core.batch.batch import Batch
from core.batch.forks import Forks
from core.batch.host_beside import HostBeside
from core.batch.host_cache import HostCache
from core.batch.index import RequestIndex
from core.batch.kept_states import KeptStates
from core.batch.request import Request
from core.batch.table import BatchTable
from core.capture.state_types import Callback
from core.inputs import NewWeights
from core.kv.beside import Beside
from core.kv.block_pool import BlockPool
from core.kv.cache_kinds import CacheKind
from core.kv.orders import Fetch, Leave, Look, Retain, Store
from core.kv.swap_space import SwapSpace
from core.proposers.ngram import NgramProposer
from core.proposers.offered import OfferedDrafts
from core.proposers.suffix import SuffixProposer
from core.scheduling.adapter_slots import AdapterSlots
from core.scheduling.admission import Admission, Delay
from core.scheduling.beams.beam_rules import BeamSearch, Candidates, Finished, Token
from core.scheduling.beams.beam_searches import BeamSearches, _Group
from core.scheduling.beams.group_rows import GroupRows
from core.scheduling.block_exchange import BlockExchange, PendingFetch
from core.scheduling.decisions import Decision
from core.scheduling.draft_rule import DraftRule
from core.scheduling.encoder_inputs import EncoderInputs, ImageInParts
from core.scheduling.ends import Ends
from core.scheduling.exchange_beside import StatesBeside, WindowsBeside
from core.scheduling.leads import Leads
from core.scheduling.limits import PartialPrefills
from core.scheduling.outputs import OutputCollector, RequestEventLog, _Rows
from core.scheduling.parties import Parties
from core.scheduling.pins.held_blocks import HeldBlocks
from core.scheduling.pins.pinned_beside import PinnedStates, PinnedWindows
from core.scheduling.pins.pinned_prefix import PinLedger, PinnedPrefix
from core.scheduling.pins.pins import Pins
from core.scheduling.policies import Fair, Fcfs, Priority, RowShares
from core.scheduling.preemption import Preemption
from core.scheduling.running_rows import RowsInTurn, RunningRows
from core.scheduling.scheduler import Scheduler
from core.scheduling.speculation import Speculation
from core.scheduling.stats import SchedulerStats
from core.scheduling.store_queue import StoreQueue, _Unstored
from core.scheduling.swapped_states import SwappedStates
from core.scheduling.virtual_time import VirtualTime
from core.scheduling.waiting_lines import FairLine, Line
from core.scheduling.waiting_queue import WaitingQueue
from core.scheduling.weight_update import WeightUpdate
from core.scheduling.whole_features import WholeFeatures
from ipc.tables.arrays import Doubles, Floats, Ints
from ipc.wire.messages import Logprobs, RequestFailed
from ipc.wire.pin_messages import Pinned
from ipc.wire.pooling_messages import Pooled
from ipc.wire.weights_messages import WeightsMark

_Policy = Fcfs | Fair
_Limit = AdapterSlots | EncoderInputs | GroupRows | WholeFeatures
_Cut = Callback(((WholeFeatures, "cut"), (EncoderInputs, "cut"), (Pins, "cut")))

FIELDS: dict[type, dict[Any, str]] = {
    Scheduler: {
        int: "block_size max_num_seqs max_num_batched_tokens num_common_blocks _token_budget _step",
        bool: "takes_turns starts_alone has_executor",
        SchedulerStats: "stats",
        OutputCollector: "outputs",
        Batch: "batch",
        BatchTable: "table",
        BlockPool: "pool",
        list[_Cut]: "cuts",  # type: ignore[valid-type]
        _Policy: "policy",
        WaitingQueue: "waiting",
        RequestIndex: "_requests",
        Preemption: "preemption",
        RunningRows: "_running_rows",
        Admission: "admission",
        Speculation: "speculation",
        Callback(((Scheduler, "_prompts_first"), (Scheduler, "_running_first"), (Scheduler, "_images_first"))): "_fill",
        BlockExchange | None: "exchange",
        Parties: "_parties",
        WeightUpdate: "weights",
        Pins: "pins",
        Leads: "_leads",
        Ends: "_ends",
        BeamSearches: "beams",
        GroupRows | None: "_group_rows",
        WholeFeatures: "_wholes",
        EncoderInputs: "encoder_inputs",
        Decision | None: "decision",
    },
    AdapterSlots: {
        int: "_max_loras",
        dict[str, int]: "_num_running",
    },
    Admission: {
        int: "_block_size _lookahead _watermark num_watermark_blocks _budget _chunk",
        bool: "_reserves_all _is_chunked",
        Batch: "_batch",
        WaitingQueue: "_waiting",
        _Policy: "_policy",
        Preemption: "_preemption",
        Delay: "_delay",
        PartialPrefills: "_partial_prefills",
        list[_Limit]: "_limits",
        BlockExchange | None: "exchange",
    },
    BeamSearch: {
        int: "_width _max_tokens _num_kept _num_tokens",
        bool: "_may_improve",
        float: "_penalty",
        bool | Literal["never"]: "_early_stopping",
        tuple[int, ...]: "_stops _ends",
        list[Token | None]: "beams",
        Floats: "_scores _finished_scores",
        list[Finished | None]: "_finished",
    },
    BeamSearches: {
        int: "_watermark _num_scheduled",
        Batch: "_batch",
        WaitingQueue: "_waiting",
        Preemption: "_preemption",
        Ends: "_ends",
        OutputCollector: "_outputs",
        SchedulerStats: "_stats",
        tuple[int, ...]: "_eos",
        dict[tuple[int, int], _Group]: "_groups",
    },
    _Group: {
        int: "num_idle_steps",
        bool: "is_broken",
        list[Request]: "beams",
        BeamSearch: "search",
        dict[int, Candidates]: "candidates",
    },
    BlockExchange: {
        int: "num_fetched num_stored _num_tickets asks_left _frees_left _weights_root",
        bool: "_asks",
        Batch: "_batch",
        WaitingQueue: "_waiting",
        HostCache: "_host",
        list[Look | Fetch | Store | Leave | Retain]: "orders",
        dict[int, PendingFetch]: "_fetches",
        StoreQueue: "stores",
        WindowsBeside | StatesBeside | None: "beside",
        deque[Request]: "_freed",
        Ints: "evictions",
    },
    StatesBeside: {
        Batch: "_batch",
        CacheKind: "kind",
        KeptStates: "_kept",
    },
    WindowsBeside: {
        int: "width",
        Beside: "_in_cache",
        CacheKind: "kind",
        HostBeside: "_on_host",
        StoreQueue: "_stores",
    },
    Delay: {
        int: "_latency_ns",
        float: "_factor",
        int | None: "_began_ns",
    },
    DraftRule: {
        int: "_overhead_ns",
        bool: "_is_free weighs_pairs",
        Ints: "_costs _alone",
        Doubles: "_least",
        Doubles | None: "_least_chance",
    },
    EncoderInputs: {
        int: "budget cache_size num_cached_tokens",
        bool: "_are_used _is_chunked",
        Batch: "_batch",
        SchedulerStats: "_stats",
        Callback(((Admission, "add_limit"),)): "_add_limit",
        list[_Cut]: "_cuts",  # type: ignore[valid-type]
        OrderedDict[bytes, int]: "_cached",
        list[bytes]: "_dropped _unused",
        ImageInParts | None: "_run",
        None: "_needs",  # only during a step, and this is between two
    },
    Ends: {
        Batch: "_batch",
        WaitingQueue: "_waiting",
        _Policy: "_policy",
        Preemption: "_preemption",
        OutputCollector: "_outputs",
        SchedulerStats: "_stats",
        RequestIndex: "_requests",
        Parties: "_parties",
        Leads: "_leads",
    },
    WeightUpdate: {
        bool: "reopens are_gone",
        Batch: "_batch",
        WaitingQueue: "_waiting",
        OutputCollector: "_outputs",
        SchedulerStats: "_stats",
        Preemption: "_preemption",
        Ends: "_ends",
        RequestIndex: "_requests",
        WeightsMark | None: "mark",
        tuple[int, NewWeights] | None: "pending",
    },
    GroupRows: {
        int: "_max_num_seqs _left",
        Batch: "_batch",
        Admission: "_admission",
        list[list[Request]]: "_groups",
        list[Request]: "_starting",
        None: "_draft",  # only during a step, and this is between two
    },
    Leads: {
        int: "_num_live",
        BatchTable: "_table",
        Forks: "_forks",
        WaitingQueue: "_waiting",
        list[Request]: "_running",
    },
    PartialPrefills: {
        int: "_max _num_starting",
        BatchTable: "_table",
        _Policy: "_policy",
        None: "_draft",
    },
    OutputCollector: {
        int: "_epoch weights_version",
        RequestEventLog: "events",
        list[_Rows]: "_rows",
        list[tuple[int, ...]]: "_ends",
        dict[int, list[int]]: "_started _drafts",
        dict[int, Logprobs]: "_logprobs",
        dict[int, Pooled]: "_pooled",
        list[tuple[int, RequestFailed]]: "_failed",
        list[tuple[int, Pinned]]: "_pinned",
    },
    Pins: {
        int: "_size _first_end_ns _now_ns",
        bool: "_is_used",
        Batch: "_batch",
        WaitingQueue: "_waiting",
        OutputCollector: "_outputs",
        SchedulerStats: "_stats",
        Ends: "_ends",
        list[_Cut]: "_cuts",  # type: ignore[valid-type]
        BlockExchange | None: "_exchange",
        BlockPool: "_pool",
        tuple[float, float]: "_shares",
        PinLedger: "ledger",
        HeldBlocks: "blocks",
        list[PinnedWindows | PinnedStates]: "_beside",
        dict[tuple[str, str, int], PinnedPrefix]: "_pins",
        list[PinnedPrefix]: "_live",
    },
    HeldBlocks: {
        int: "max_pages _max_of_tenant",
        Batch: "_batch",
        BlockPool: "_pool",
        Ints: "_references",
        dict[str, int]: "_of_tenant",
    },
    PinnedWindows: {
        Batch: "_batch",
        HeldBlocks: "_blocks",
    },
    PinnedStates: {
        Batch: "_batch",
        KeptStates: "_kept",
        PinLedger: "_ledger",
    },
    PinLedger: {
        int: "max_blocks max_of_tenant _size",
        str: "_noun",
        dict[int, int]: "counts",
        dict[str, int]: "_of_tenant _with_repeats",
    },
    Parties: {
        int: "_num_named",
        _Policy: "_policy",
        Mapping[str, float]: "_weights",
        dict[str, int]: "_numbers _num_live",
        OrderedDict[str, None]: "_idle",
    },
    Fcfs: {
        Line: "line",
        BatchTable: "_table",
    },
    Priority: {
        int: "_aging_ns",
    },
    Fair: {
        int: "_quantum",
        BatchTable: "_table",
        VirtualTime: "_times",
        RowShares: "_shares",
        FairLine: "line",
    },
    Preemption: {
        int: "_recompute_ns _swap_ns state_blocks num_swapped",
        Batch: "_batch",
        WaitingQueue: "_waiting",
        _Policy: "_policy",
        SchedulerStats: "_stats",
        Literal["recompute", "swap", "auto"]: "_mode",
        SwapSpace: "swap_space",
        SwappedStates | None: "states",
    },
    SwappedStates: {
        int: "_first",
        Batch: "_batch",
        SwapSpace: "space",
    },
    RequestEventLog: {dict[int, list[int]]: "_events"},
    RowShares: {
        int: "_max_num_seqs",
        VirtualTime: "_times",
    },
    RunningRows: {
        int: "_long_prefill",
        Batch: "_batch",
        WaitingQueue: "_waiting",
        _Policy: "_policy",
        Preemption: "_preemption",
    },
    RowsInTurn: {int: "_num_steps"},
    Speculation: {
        list[Annotated[NDArray[np.generic], 2]]: "_blocks",
        int: "_watermark _most most_in_step",
        Batch: "_batch",
        WaitingQueue: "_waiting",
        _Policy: "_policy",
        SchedulerStats: "_stats",
        DraftRule: "_rule",
        Ints: "_kinds_tried _kinds_right _first_right",
        OfferedDrafts: "offered",
        list[NgramProposer | SuffixProposer]: "proposers",
    },
    StoreQueue: {
        HostCache: "_host",
        list[_Unstored]: "_kinds",
        dict[int, Ints]: "_stores",
        Ints: "_queued_at",
    },
    _Unstored: {
        HostBeside | None: "beside",
        Ints: "contents",
        int: "width",
        deque[tuple[int, int]]: "queue",
    },
    VirtualTime: {
        int: "_latest",
        dict[int, int]: "_slots",
        list[int]: "_free",
        Ints: "_times _costs _num_present _lifted_to",
    },
    Line: {
        int: "_num_pushed _length",
        list[tuple[int, int, int, Request]]: "_heap",
    },
    FairLine: {
        int: "_length",
        VirtualTime: "_times",
        dict[int, Line]: "_lines",
        list[tuple[int, bool, int]]: "_heap",
    },
    WaitingQueue: {
        int: "_num_held num_tokens",
        Line | FairLine: "_line",
        dict[int, dict[tuple[int, int], Request]]: "_held",
        dict[tuple[int, int, int], Request]: "_aside",
        dict[tuple[int, int, int], Request] | None: "_unbegun",
    },
    WholeFeatures: {
        bool: "_are_used",
        Batch: "_batch",
        Callback(((Admission, "add_limit"),)): "_add_limit",
        list[_Cut]: "_cuts",  # type: ignore[valid-type]
    },
}
