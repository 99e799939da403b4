"""The control groups (cgroups(7)) that this process is in, as folders: its own, and all groups above it."""

from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, whether it is of version 2) of each group whose limits of this controller apply to this process.

    controller: "cpu" or "memory". The limits of a group apply to all groups below it, so the lowest limit counts.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for hierarchy, controllers, path in (line.split(":", 2) for line in lines):
        is_version_2 = hierarchy == "0"
        if not is_version_2 and controller not in controllers.split(","):
            continue
        root = _CGROUPS if is_version_2 else _CGROUPS / controller
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, is_version_2
            if folder == root:
                break
