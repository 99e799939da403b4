"""Where an executor runs: in the process that creates it, or in separate worker processes."""

import re

import msgspec

from ipc.options.config import SEPARATE, Config, EngineConfig

MASTER_PORT = 29_501  # as vLLM's master_port
_HAS_PORT = re.compile(r"(^[^:]+|\]):[0-9]+$")  # of a name, an IPv4 address or [an IPv6 address]


def has_workers(config: EngineConfig) -> bool:
    """Return whether the executor runs in separate processes."""
    return config.distributed_executor_backend in SEPARATE or num_workers(config) > 1


def num_workers(config: EngineConfig) -> int:
    """Return the number of processes that compute the model together."""
    return config.tensor_parallel_size * config.pipeline_parallel_size


def first_machine(config: EngineConfig) -> int:
    """Return the first machine with workers: 0, the engine's, or 1 if Ray places all of them."""
    return 1 if config.distributed_executor_backend == "ray" else 0


def num_machines(config: EngineConfig) -> int:
    """Return the number of machines, with the engine's."""
    return config.nnodes + first_machine(config)


def in_one_process(config: Config) -> Config:
    """Return the config of an executor in the process that creates it: a worker's, or that of a replay."""
    return msgspec.structs.replace(
        config,
        distributed_executor_backend="uni",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        nnodes=1,
        async_scheduling=False,
    )


def master_address(config: EngineConfig) -> str:
    """Return the address at which the engine's other machines join."""
    address = config.master_addr or ""
    if "://" in address:
        return address
    return f"tcp://{address}" if _HAS_PORT.search(address) else f"tcp://{address}:{MASTER_PORT}"


def overlaps(config: EngineConfig) -> bool:
    """Return async_scheduling, with its default: steps overlap on a GPU, unless a model there makes drafts."""
    if config.async_scheduling is None:
        return config.executor == "local" and config.device == "cuda" and not drafts_by_model(config)
    return config.async_scheduling


def drafts_by_model(config: EngineConfig) -> bool:
    """Return whether a model in the executor makes drafts, for which it needs each step's tokens."""
    return config.speculative_config is not None and config.speculative_config.runs_model


def most_in_flight(config: EngineConfig) -> int:
    """Return how many steps are started before waiting for the result of the first: one for each stage.

    If steps overlap, one more, which waits while its stage is busy.
    """
    return config.pipeline_parallel_size + overlaps(config)
