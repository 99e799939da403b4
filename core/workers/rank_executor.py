"""A rank's executor: the local executor with a part of the model, in a worker process of a group."""

from functools import partial

import msgspec

from core.executors.local import LocalExecutor
from core.models.rank import Rank
from core.models.shard import Shard
from core.workers.rank_channel import Followers
from core.workers.rank_runners import FollowingRunner, LeadingRunner
from ipc.channel import Channel
from ipc.config import EngineConfig
from kernels.cpu.group import SharedMemory


def create_rank(config: EngineConfig, number: int, size: int, group_fd: int, peers: list[Channel]) -> LocalExecutor:
    """Create the executor of the rank with this number, in a group of `size`.

    group_fd: of make_shared_file(). peers: of the first rank the channels to the others; of another the one to the
    first. Errors: those of LocalExecutor.
    """
    rank = Rank(Shard(number, size), SharedMemory(group_fd))
    if number:
        config = msgspec.structs.replace(config, speculative_config=None)  # the first rank makes all drafts
        return LocalExecutor(config, rank, partial(FollowingRunner, leader=peers[0]))
    return LocalExecutor(config, rank, partial(LeadingRunner, followers=Followers(peers)))
