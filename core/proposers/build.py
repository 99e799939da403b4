"""build_proposer: creates the source of drafts that speculative_config names."""

from core.batch.table import BatchTable
from core.proposers.ngram import NgramProposer
from core.proposers.proposer import Proposer
from core.proposers.suffix import SuffixProposer
from ipc.options.resolved import ResolvedConfig
from ipc.options.speculation import SpeculativeConfig


def build_proposer(config: ResolvedConfig, settings: SpeculativeConfig, table: BatchTable) -> Proposer | None:
    """Return the proposer, or None if a model in the executor makes the drafts."""
    if settings.runs_model:
        return None
    num_tokens = min(config.num_blocks_override * config.block_size, config.max_num_seqs * config.max_model_len)
    if settings.method == "suffix":
        return SuffixProposer(table, settings, num_tokens)
    lengths = tuple(range(settings.prompt_lookup_max, settings.prompt_lookup_min - 1, -1))
    return NgramProposer(table, lengths, num_tokens)
