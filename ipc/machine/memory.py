"""usable_memory_bytes: the memory that this process may use, from the machine's size and the limits of its control
groups.
"""

import os
from pathlib import Path

from ipc.machine.control_groups import control_groups


def usable_memory_bytes() -> int:
    """Return the bytes of the machine's memory, or the lowest limit of a control group (container, systemd's MemoryMax)
    if that is less.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_limit(folder, is_version_2) for folder, is_version_2 in control_groups("memory")]
    return min([total, *(limit for limit in limits if limit is not None)])


def _limit(folder: Path, is_version_2: bool) -> int | None:
    """Return the limit of a group; None if it has none: "max" in version 2. In version 1 it is near 2**63 then."""
    try:
        limit = int((folder / ("memory.max" if is_version_2 else "memory.limit_in_bytes")).read_text())
    except (OSError, ValueError):
        return None
    return limit if limit > 0 else None
