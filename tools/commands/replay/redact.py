"""`engine-core replay redact FILE OUT`: a capture without its content, which decides as the original does."""

from collections.abc import Sequence

from core.capture.file import CaptureFile
from core.capture.redaction import redact
from tools.flags.options import ArgumentParser


def run_redact(arguments: Sequence[str]) -> int:
    """Write the file and return the exit status. Errors: CaptureFileError, ConfigError, OSError."""
    parser = ArgumentParser(
        prog="engine-core replay redact",
        usage="engine-core replay redact FILE OUT",
        description="Write a capture without its content: tokens, salts and tenants get other names under a key that "
        "is thrown away. Every decision stays, and the new file replays. Times, lengths and who shares how much with "
        "whom stay, too: the decisions are made of them.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("out", metavar="OUT", help="a new file")
    parsed = parser.parse_args(arguments)
    done = redact(CaptureFile(parsed.file), parsed.out)
    print(f"{parsed.out}: {done.num_steps} steps, {done.num_requests} requests, every decision as in {parsed.file}")
    return 0
