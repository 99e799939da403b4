"""An engine as a child process of a program: EngineProcess, its config, and what shows from outside whether it works.

docs/operations.md explains them.
"""

from frontend.engine.process import EngineProcess
from ipc.options.config import EngineConfig
from ipc.records.black_box import find_black_box

__all__ = ["EngineConfig", "EngineProcess", "find_black_box"]
