"""`engine-core ray`: several engines as Ray actors, and a router over them in the foreground.

Signals act as for `engine-core route`: the first one drains. When it ends, its engines end too.
"""

import argparse
import contextlib
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.fleet.placement import POLICIES
from ipc.errors import EngineCoreError
from ipc.wire.sockets import check_address
from tools.commands.control import read_owner_file
from tools.commands.ray_fleet.fleet import Change, RayFleet, deploy
from tools.commands.route.__main__ import main as route
from tools.flags.options import ArgumentParser, add_engine_options, engine_options

_RETRY_S = 0.2


def main(arguments: Sequence[str]) -> int:
    """Deploy and route until a signal or the owner ends it; return the exit status. Errors: ConfigError, AddressError,
    EngineStartError.
    """
    parsed = _parse(arguments)
    check_address(parsed.listen, binding=True)
    fleet = deploy(
        replicas=parsed.replicas,
        num_cpus=parsed.replica_cpus,
        num_gpus=parsed.replica_gpus,
        ray_address=parsed.ray_address,
        network=parsed.network or None,
        start_timeout=parsed.start_timeout,
        **engine_options(parsed),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(fleet.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-core-ray-")))
        owner_file = Path(parsed.owner_file or folder / "owner")
        ended = threading.Event()
        teller = threading.Thread(target=_tell_router, args=(fleet, parsed.listen, owner_file, ended), daemon=True)
        teller.start()
        stack.callback(teller.join)
        stack.callback(ended.set)
        words = ["--listen", parsed.listen, "--owner-file", str(owner_file), "--route", parsed.route]
        return route([*words, "--replica", *fleet.addresses])


def _tell_router(fleet: RayFleet, address: str, owner_file: Path, ended: threading.Event) -> None:
    """Connect to the router as its owner, and report replicas that come back at another address to it."""
    while not ended.wait(_RETRY_S):
        try:
            client = EngineClient(ZmqTransport(address), name="ray", owner_token=read_owner_file(str(owner_file)))
        except EngineCoreError:
            continue  # it is not there yet
        fleet.follow(client, _say)
        ended.wait()
        client.close()
        return


def _say(change: Change) -> None:
    print(f"engine-core: replica {change.old or 'none'} -> {change.new or 'none'}", file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="engine-core ray",
        usage="engine-core ray --listen ADDR [--replicas N] [OPTION ...]",
        description="Serve several engines of one model as one. Ray places, starts and restarts them.",
    )
    parser.add_argument("--listen", required=True, metavar="ADDR", help="address for clients, as `route --listen`")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="number of engines; default: %(default)d")
    parser.add_argument(
        "--ray-address", metavar="ADDR", help="address of a running cluster; default: RAY_ADDRESS, or a new cluster"
    )
    parser.add_argument(
        "--replica-cpus", type=float, default=1, metavar="N", help="CPUs of each engine, as Ray counts them; default: 1"
    )
    parser.add_argument("--replica-gpus", type=float, default=0, metavar="N", help="GPUs of each engine; default: 0")
    parser.add_argument(
        "--network",
        action="store_true",
        help="listen on the nodes' addresses, with keys, even on a cluster of one node",
    )
    parser.add_argument("--route", choices=tuple(POLICIES), default="prefix", help="see `engine-core route`")
    parser.add_argument("--owner-file", metavar="FILE", help="write the owner file for `engine-core control` here")
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="S", help="seconds; default: %(default)g")
    add_engine_options(parser)
    parsed: argparse.Namespace = parser.parse_args(arguments)
    return parsed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
