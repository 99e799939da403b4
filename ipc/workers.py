"""Where an executor runs: in the process that creates it, or in worker processes of its own."""

import msgspec

from ipc.config import EngineConfig


def has_workers(config: EngineConfig) -> bool:
    """Return whether the executor runs in processes of its own."""
    return config.distributed_executor_backend == "mp" or config.tensor_parallel_size > 1


def in_one_process(config: EngineConfig) -> EngineConfig:
    """Return the config of an executor in the process that creates it: a worker's, or that of a replay."""
    changed = {"distributed_executor_backend": "uni", "tensor_parallel_size": 1, "async_scheduling": False}
    return msgspec.structs.replace(config, **changed)
