"""The package that users import: `from engine_core import LLM, AsyncLLM, SamplingParams`.

The names are those of engine_core/names.py, which is imported at the first use of one of them. An installed wheel has
all other modules in this package, so the engine process and `engine-core --help` import this file too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ipc.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from engine_core.names import *  # noqa: F403
    from engine_core.names import __all__  # noqa: F401
else:

    def __getattr__(name: str) -> Any:
        """Import the public names. Errors: AttributeError when `name` is none of them."""
        if name == "__all__" or not name.startswith("_"):
            names = importlib.import_module(f"{__name__}.names")
            globals().update({"__all__": names.__all__}, **{public: getattr(names, public) for public in names.__all__})
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return [*__getattr__("__all__"), "__version__"]
