"""build_proposer: the source of drafts that speculative_config names."""

from core.batch.table import BatchTable
from core.proposers.ngram import NgramProposer
from core.proposers.proposer import Proposer
from ipc.config import EngineConfig
from ipc.speculation import SpeculativeConfig


def build_proposer(config: EngineConfig, settings: SpeculativeConfig, table: BatchTable) -> Proposer:
    """Return the proposer of a resolved config."""
    assert config.max_model_len is not None, "the config is not resolved"
    assert config.num_blocks_override is not None, "the config is not resolved"
    num_tokens = min(config.num_blocks_override * config.block_size, config.max_num_seqs * config.max_model_len)
    return NgramProposer(table, settings, num_tokens)
