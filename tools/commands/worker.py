"""`engine-core worker`: run workers on this machine for an engine on another one (docs/scale_out.md).

`engine-core serve --node-rank N --master-addr ADDR` with N above 0 is the same. It runs until a signal ends it; if the
engine ends, it waits for the next one.
"""

import argparse
import os
import signal
import threading
from collections.abc import Sequence

from core import log
from core.workers.node import Node
from ipc.wire.sockets import check_address
from tools.flags.options import ArgumentParser

_FLUSH_S = 0.5


def main(arguments: Sequence[str]) -> int:
    """Run workers until a signal; return the exit status.

    Errors: AddressError; ConfigError if the engine refuses it.
    """
    parser = ArgumentParser(
        prog="engine-core worker",
        usage="engine-core worker --connect ADDR [--node-rank N] [--model PATH]",
        description="Run workers for an engine on another machine that was started with --nnodes.",
    )
    parser.add_argument(
        "--connect",
        required=True,
        metavar="ADDR",
        help="the engine's --master-addr: tcp://HOST:PORT?keys=FILE, or tcp://127.0.0.1:PORT",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        default=0,
        metavar="N",
        help="this machine's number, from 1; default: any missing one",
    )
    parser.add_argument(
        "--model", metavar="PATH", help="the model's files on this machine; default: those of the engine's model name"
    )
    parser.add_argument("--lease-fd", type=int, default=-1, help=argparse.SUPPRESS)  # ends with the pipe's other end
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="of lines on standard error")
    parsed: argparse.Namespace = parser.parse_args(arguments)
    log.use_format(parsed.log_format)
    return run_node(parsed.connect, parsed.node_rank, parsed.model, parsed.lease_fd)


def run_node(address: str, node: int, model: str | None, lease_fd: int = -1) -> int:
    """Run workers until SIGTERM, SIGINT or SIGHUP; return the exit status. Errors: as main().

    lease_fd: of a pipe whose other end ends them too; -1 = there is none.
    """
    check_address(address, binding=False)
    machine = Node(address, node, None if model is None else os.path.abspath(model) if os.path.exists(model) else model)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: machine.stop())
    if lease_fd >= 0:
        threading.Thread(target=_await_end, args=(lease_fd, machine), name="lease", daemon=True).start()
    log.say(f"engine-core: connects to the engine at {address.partition('?')[0]} to run workers for it")
    try:
        machine.run()
    finally:
        log.flush(_FLUSH_S)
    return 0


def _await_end(lease_fd: int, machine: Node) -> None:
    while os.read(lease_fd, 1):
        pass
    machine.stop()
