"""The names of schedulers: the built-in one, an installed plug-in's, or MODULE:NAME. Nothing is imported here."""

import re

from ipc.errors import ConfigError

#: The entry-point group of schedulers, and the name of the built-in one.
SCHEDULERS, BUILT_IN_SCHEDULER = "engine_core.schedulers", "default"
_MAX_LENGTH = 128
_NAME = re.compile(r"[\w.\-]+|[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_scheduler(name: object, rotate_bytes: int) -> None:
    """Check the name of a scheduler, not whether it exists, and that its captures can rotate. Errors: ConfigError."""
    if not isinstance(name, str) or len(name) > _MAX_LENGTH or not _NAME.fullmatch(name):
        raise ConfigError(
            f"scheduler_cls must be {BUILT_IN_SCHEDULER!r}, the name of an installed scheduler or MODULE:NAME; got "
            f"{name!r:.80} (docs/schedulers.md)"
        )
    if name != BUILT_IN_SCHEDULER and rotate_bytes:
        raise ConfigError(
            f"capture_rotate_bytes starts each file with a checkpoint, and scheduler_cls={name!r} has none: "
            "leave one of them out"
        )
