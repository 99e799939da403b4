"""`python -m tests.core.workers.emulated_engine ...`: an engine process with workers under Triton's interpreter."""

import os
import sys
from typing import Any

import tests.triton_device  # noqa: F401  for an engine without workers
from core import log
from core.__main__ import main
from core.workers import processes
from ipc.machine.child_process import run_package


def emulated(_: str, *rest: Any) -> Any:
    return run_package("tests.core.workers.emulated", *rest)


if __name__ == "__main__":
    processes.run_package = emulated
    code = main(sys.argv[1:])
    log.flush(1.0)
    os._exit(code)
