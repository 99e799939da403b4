"""`python -m tests.core.emulated ...`: an engine process under Triton's interpreter, quickened and with a tensor core's
products."""

import os
import sys

import tests.triton_device  # noqa: F401  installs both
from core import log
from core.__main__ import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    log.flush(1.0)
    os._exit(code)
