"""`python -m tests.core.workers.emulated FD`: a worker under Triton's interpreter, with a tensor core's products."""

import os
import sys

import tests.triton_device  # noqa: F401  installs the products
from core import log
from core.workers.__main__ import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    log.flush(1.0)
    os._exit(code)
