"""The version of this package."""

import importlib.metadata

DISTRIBUTION = "engine-core"


def version() -> str:
    """Return the version of the installed distribution; "0" in a checkout that was never installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0"
