"""The command line: `engine-core` and `python -m engine_core`."""

import gc
import sys

gc.disable()  # until main() has loaded the command's modules: it would look through what stays

from tools.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
