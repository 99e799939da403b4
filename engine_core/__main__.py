"""The command line: `engine-core` and `python -m engine_core`."""

import sys

from tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
