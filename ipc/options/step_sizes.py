"""StepSizes: how many requests run and how many tokens a step has, if the options do not say it."""

from typing import NamedTuple

import msgspec

from ipc.options.config import EngineConfig


class StepSizes(NamedTuple):
    """The most requests that run at the same time, and the tokens of a step."""

    num_rows: int
    num_tokens: int


#: A CPU has its full speed with few rows, and a long step delays the tokens of other requests.
ON_CPU = StepSizes(32, 512)
#: A GPU needs hundreds of rows for its full speed. Its memory must hold the intermediate results of all tokens, and
#: those of the splits of all rows' contexts. The keys are the least memory in bytes: a card "of 80 GB" has 79 GiB.
_BY_DEVICE_BYTES = {70 << 30: StepSizes(1024, 8192), 36 << 30: StepSizes(512, 8192), 0: StepSizes(256, 4096)}


def chosen_sizes(device_bytes: int) -> StepSizes:
    """Return the sizes for options that are not given.

    device_bytes: the memory of the device that computes the model; 0: it computes in the host's memory.
    """
    if not device_bytes:
        return ON_CPU
    return next(sizes for least, sizes in _BY_DEVICE_BYTES.items() if device_bytes >= least)


def most_rows(config: EngineConfig) -> int:
    """Return the most rows that an engine with these options may have, whatever its device."""
    return config.max_num_seqs or max(sizes.num_rows for sizes in (ON_CPU, *_BY_DEVICE_BYTES.values()))


class SizedConfig(EngineConfig, frozen=True, kw_only=True, omit_defaults=True):
    """The options once the number of rows is decided; the other sizes may not be."""

    max_num_seqs: int = ON_CPU.num_rows  # captures of earlier versions leave out this number


def with_rows(config: EngineConfig, device_bytes: int = 0) -> SizedConfig:
    """Return the config with max_num_seqs, as given or chosen. device_bytes: see chosen_sizes()."""
    num_rows = config.max_num_seqs or chosen_sizes(device_bytes).num_rows
    return SizedConfig(**{**msgspec.structs.asdict(config), "max_num_seqs": num_rows})
