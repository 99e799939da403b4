"""`engine-core control`: pause, resume, drain, upgrade, dump or shut down a running engine or router, change its
adapters or weights, or let it sleep, as its owner.
"""

import argparse
import fcntl
import os
import re
from collections.abc import Callable, Sequence

from frontend.client.call_client import CallClient
from frontend.client.transport import ZmqTransport
from frontend.weights import update_weights, wake_up
from ipc.errors import ConfigError
from ipc.log_lines import counted
from ipc.records.flight_ring import find_ring
from ipc.wire.fleet_messages import ReplicaList
from ipc.wire.messages import PauseMode
from tools.flags.address import address_to_connect, owner_file_to_read
from tools.flags.options import ArgumentParser

_ACTIONS: dict[str, Callable[[CallClient, argparse.Namespace], None]] = {
    "pause": lambda client, options: client.pause(PauseMode[options.mode.upper()]),
    "resume": lambda client, _: client.resume(),
    "drain": lambda client, options: client.drain(move_after=options.move_after),
    "upgrade": lambda client, _: client.upgrade(),
    "shutdown": lambda client, _: client.shutdown(),
    "reset-prefix-cache": lambda client, _: client.reset_prefix_cache(),
    "dump": lambda client, options: dump(client, options.out),
    "lora": lambda client, options: steer_adapters(client, options.words),
    "weights": lambda client, options: change_weights(client, options.words, options.in_flight),
    "sleep": lambda client, options: client.sleep(options.level),
    "wake-up": lambda client, _: wake_up(client),
    "replicas": lambda client, _: print("\n".join(describe_replicas(client.replicas()))),
    "join": lambda client, options: client.join(_replica(options), prefills=options.prefill),
    "leave": lambda client, options: client.leave(_replica(options), move_after=options.move_after),
}
#: Those that print something of their own.
_TELLING = ("dump", "lora", "weights", "replicas")
_LOAD_S = 300.0  # limit for reading an adapter
_OF_A_REPLICA = ("join", "leave")
_OWNER_FILE = re.compile(rb"([0-9a-f]*\n)?")


def main(arguments: Sequence[str]) -> int:
    """Do one action on a running engine and return the exit status. Errors: ConfigError; those of the client."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.prefill and parsed.action != "join":
        parser.error("--prefill is for join only")
    if parsed.out is not None and parsed.action != "dump":
        parser.error("--out is for dump only")
    if parsed.action in _OF_A_REPLICA and len(parsed.words) != 1:
        parser.error(f"{parsed.action} needs the address of one replica")
    if parsed.words and parsed.action not in ("lora", "weights", *_OF_A_REPLICA):
        parser.error(f"{parsed.action} takes no words: {' '.join(parsed.words)}")
    owner_file = owner_file_to_read(parsed.owner_file, parsed.connect)
    token = b"" if owner_file is None else read_owner_file(owner_file)
    client = CallClient(ZmqTransport(address_to_connect(parsed.connect)), name="control", owner_token=token)
    try:
        _ACTIONS[parsed.action](client, parsed)
    finally:
        client.close()
    if parsed.action not in _TELLING:
        print(f"{parsed.action}: done")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="engine-core control",
        usage=f"engine-core control {{{','.join(_ACTIONS)}}} [WORD ...] [--connect ADDR] [--owner-file FILE]",
        description="Control a running engine or router. All actions except reset-prefix-cache, lora list, weights "
        "without a path, replicas and dump need the owner file: see serve --owner-file. dump reads the engine's "
        "memory, so it must run as the engine's user. For a router: replicas shows its engines, join and leave change "
        "them.",
    )
    parser.add_argument("action", choices=tuple(_ACTIONS))
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="for join and leave: a replica's address. For lora: load NAME=PATH reads an adapter's files while steps "
        "go on; unload NAME removes its name; list prints what is loaded. For weights: PATH, of the model's new "
        "weights; without it the present ones are shown",
    )
    parser.add_argument("--connect", metavar="ADDR", help="the engine's address; default: that of `engine-core serve`")
    parser.add_argument("--owner-file", metavar="FILE", help="the file of `engine-core serve --owner-file FILE`")
    parser.add_argument(
        "--mode", choices=("new", "all"), default="new", help="for pause: no request begins, or none runs; default: new"
    )
    parser.add_argument(
        "--in-flight",
        choices=("wait", "keep", "abort"),
        default="wait",
        help="for weights: requests that have begun end with the old weights first, continue with the new ones, or are "
        "aborted; default: wait",
    )
    parser.add_argument(
        "--level",
        type=int,
        choices=(1, 2),
        default=1,
        help="for sleep: free the memory of the KV cache (1), and of the weights too (2); default: 1",
    )
    parser.add_argument(
        "--move-after",
        type=float,
        metavar="S",
        help="for drain: end after this many seconds; unfinished requests continue at the next engine. For leave: "
        "running requests continue at other replicas after this many seconds",
    )
    parser.add_argument(
        "--prefill", action="store_true", help="for join: from now on the replica computes long prompts for the others"
    )
    parser.add_argument("--out", metavar="FILE", help="for dump: the new file; default: one in the engine's folder")
    return parser


def dump(client: CallClient, out: str | None) -> None:
    """Write the running engine's flight recorder to a file, and print its name. The engine does not notice.

    Errors: ConfigError if there is none that this user may read; those of write_flight.
    """
    # Imported here because only this action reads captures, which takes longer than any other action.
    from core.capture.flight_file import write_flight
    from core.capture.write_flight import describe

    pid = client.welcome.pid
    halves = find_ring(pid)
    if not halves:
        raise ConfigError(
            f"the flight recorder of engine process {pid} cannot be read: the engine must run on this machine, as "
            "this user, without --capture, and with flight_recorder_bytes above 0"
        )
    written = write_flight(halves, pid, out)
    if written is None:
        raise ConfigError(f"engine process {pid} has not run a step yet")
    print(describe(written, pid))


def steer_adapters(client: CallClient, words: Sequence[str]) -> None:
    """Load, unload or list adapters. Errors: ConfigError for other words; CallFailedError."""
    match words:
        case ["list"]:
            shown = client.list_lora()
        case ["load", pair] if "=" in pair and pair[0] != "=" and pair[-1] != "=":
            name, _, path = pair.partition("=")
            shown = [client.load_lora(name, os.path.abspath(path), _LOAD_S)]
        case ["unload", name]:
            client.unload_lora(name)
            return
        case _:
            raise ConfigError(f"lora needs load NAME=PATH, unload NAME or list; got {' '.join(words)!r:.80}")
    for one in shown:
        where = f"  {one.path}" if one.path else ""
        print(f"{one.name}  rank {one.rank}  {one.num_bytes / 2**20:.1f} MiB  {one.digest}{where}")


def change_weights(client: CallClient, words: Sequence[str], in_flight: str) -> None:
    """Give the engine other weights, or show which it has. Errors: ConfigError for several paths; CallFailedError."""
    if len(words) > 1:
        raise ConfigError(f"weights needs one PATH, or none; got {' '.join(words)!r:.80}")
    mark = update_weights(client, words[0], in_flight) if words else client.weights().mark
    print(f"weights of version {mark.version}: {mark.weights}; fingerprint {mark.fingerprint}")


def _replica(options: argparse.Namespace) -> str:
    return str(options.words[0])


def describe_replicas(answer: ReplicaList) -> list[str]:
    """Return a line for each replica of a fleet, and one for the fleet."""
    width = max([len("replica"), *(len(one.address) for one in answer.replicas)])
    lines = [f"{'replica':{width}}  {'state':10}  {'requests':>8}  {'to compute':>10}  {'blocks':>8}  {'lost':>4}"]
    for one in answer.replicas:
        numbers = f"{one.num_live:8}  {one.num_queued_tokens:10}  {one.num_cached_blocks:8}  {one.num_lost:4}"
        lines.append(f"{one.address:{width}}  {one.state:10}  {numbers}  {one.reason}".rstrip())
    lines.append(
        f"{counted(answer.num_queued, 'request waits', 'requests wait')} for a replica; {answer.num_moved} times a "
        "request continued at another replica"
    )
    return lines


def write_owner_file(path: str, token: bytes) -> int:
    """Write the owner token to a file that only this user can read; return its descriptor, which is locked.

    The kernel releases the lock when the process ends, so the file of a killed engine is taken over. Errors:
    ConfigError if the file is in use, or is not an owner file.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ConfigError(f"--owner-file {path} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _OWNER_FILE.fullmatch(os.pread(fd, 1000, 0)) or os.fstat(fd).st_uid != os.geteuid():
            raise ConfigError(f"--owner-file {path} exists and is not an owner file: name another")
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        os.pwrite(fd, token.hex().encode() + b"\n", 0)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"--owner-file {path} is in use by a running `engine-core serve`: name another") from None
    except OSError as error:  # a full disk
        os.close(fd)
        raise ConfigError(f"--owner-file {path} cannot be written: {error.strerror}") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_owner_file(path: str) -> bytes:
    """Return the owner token of a file that write_owner_file() made. Errors: ConfigError."""
    try:
        with open(path, encoding="ascii") as file:
            return bytes.fromhex(file.read(1000).strip())
    except OSError as error:
        raise ConfigError(f"--owner-file {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"--owner-file {path} was not written by `engine-core serve --owner-file`") from None
