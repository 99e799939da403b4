"""Addresses, and what the two sockets promise: no stealing, nothing left behind, bounds."""

import errno
import fcntl
import os
import socket as sockets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ipc.errors import AddressError, EngineDeadError
from ipc.wire.messages import MAX_CLIENT_MESSAGE_BYTES
from ipc.wire.sockets import (
    ROUTER_RECEIVE_MARK,
    Context,
    bind_router,
    check_address,
    check_listening,
    connect_dealer,
    private_ipc_address,
    remove_private_address,
)


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address() -> Iterator[str]:
    address = private_ipc_address()
    yield address
    remove_private_address(address)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("", "write ipc:///absolute/path or tcp://127.0.0.1:PORT"),
        ("localhost:5000", "write ipc:///absolute/path"),
        ("inproc://engine", "write ipc:///absolute/path"),
        ("tcp://127.0.0.1", "write ipc:///absolute/path"),
        ("tcp://127.0.0.1:x", "write ipc:///absolute/path"),
        ("tcp://127.0.0.1:65536", "must be from 0 to 65535"),
        ("tcp://0.0.0.0:5000", "is reachable from other machines"),
        ("tcp://*:5000", "is reachable from other machines"),
        ("tcp://[::]:5000", "is reachable from other machines"),
        ("tcp://192.168.0.4:5000", "so it needs keys"),
        ("tcp://example.org:5000", "so it needs keys"),
        ("ipc://engine.sock", "needs an absolute path"),
        ("ipc://@abstract", "needs an absolute path"),
        ("ipc://*", "needs an absolute path"),
        ("ipc:///tmp/", "must name one file"),
        ("ipc:///tmp/a*", "must name one file"),
        ("ipc:///" + "x" * 107, "has 108 bytes and a socket's path at most 107: shorten it by 1"),
    ],
)
def test_address_that_cannot_be_bound(context: Context, address: str, text: str) -> None:
    with pytest.raises(AddressError, match=r".") as caught:
        bind_router(context, address)
    assert text in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://0.0.0.0:5000", "ipc://x", "nonsense"])
def test_address_that_cannot_be_connected_to(context: Context, address: str) -> None:
    with pytest.raises(AddressError):
        connect_dealer(context, address)


@pytest.mark.parametrize(
    "address", ["ipc:///" + "x" * 106, "tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:65535"]
)
def test_good_addresses(address: str) -> None:
    check_address(address, binding=True)
    check_address(address, binding=False)


def exchange(context: Context, router: zmq.Socket[bytes], address: str) -> None:
    dealer = connect_dealer(context, address)
    dealer.send(b"question")
    identity, question = router.recv_multipart()
    router.send_multipart([identity, b"to " + question])
    assert dealer.recv() == b"to question"
    dealer.close()


def test_ipc_socket_is_private_and_leaves_nothing(context: Context, address: str) -> None:
    path = Path(address.removeprefix("ipc://"))
    umask = os.umask(0o022)
    try:
        router = bind_router(context, address, is_private=True)
        assert os.umask(0o022) == 0o022  # put back
    finally:
        os.umask(umask)
    assert router.address == address
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    exchange(context, router.socket, address)
    router.close()
    router.close()  # idempotent
    assert not path.parent.exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_tcp_port_0_reports_the_real_port(context: Context, host: str) -> None:
    router = bind_router(context, f"tcp://{host}:0")
    assert int(router.address.rpartition(":")[2]) > 0
    exchange(context, router.socket, router.address)
    with pytest.raises(AddressError, match=r"in use.*: stop its owner or choose another"):
        bind_router(context, router.address)
    router.close()


def test_live_owner_is_named_and_keeps_its_clients(context: Context, address: str) -> None:
    router = bind_router(context, address)
    with pytest.raises(AddressError, match=f"in use by a live engine, process {os.getpid()}: connect to it"):
        bind_router(context, address)
    exchange(context, router.socket, address)
    router.close()


def test_leftovers_of_a_dead_owner_are_cleaned(context: Context, address: str) -> None:
    path = address.removeprefix("ipc://")
    with sockets.socket(sockets.AF_UNIX) as dead:
        dead.bind(path)
    Path(path + ".lock").write_text("4194304\n")
    router = bind_router(context, address)
    exchange(context, router.socket, address)
    router.close()


def test_strangers_listening_without_a_lock_are_not_robbed(context: Context, address: str) -> None:
    path = address.removeprefix("ipc://")
    with sockets.socket(sockets.AF_UNIX) as alive:
        alive.bind(path)
        alive.listen()
        with pytest.raises(AddressError, match="in use by another live process"):
            bind_router(context, address)
        assert os.path.exists(path)


def test_files_that_are_no_sockets_stay(context: Context, tmp_path: Path) -> None:
    path = Path(os.environ["TMPDIR"]) / "precious"
    path.write_text("data")
    with pytest.raises(AddressError, match="exists and is not a socket"):
        bind_router(context, f"ipc://{path}")
    assert path.read_text() == "data"
    assert not path.with_name("precious.lock").exists()
    path.unlink()


def test_directory_must_exist(context: Context) -> None:
    with pytest.raises(AddressError, match="its directory must exist"):
        bind_router(context, "ipc:///nonexistent/engine.sock")


def test_directory_must_be_ours_to_write(context: Context, address: str) -> None:
    directory = os.path.dirname(address.removeprefix("ipc://"))
    os.chmod(directory, 0o777)
    with pytest.raises(AddressError, match=rf"every user may write to {directory}; .*chmod o-w"):
        bind_router(context, address)
    os.chmod(directory, 0o1777)  # as /tmp: only its owner may replace a file
    bind_router(context, address).close()


def test_lock_is_no_way_through_a_link(context: Context, address: str) -> None:
    path = address.removeprefix("ipc://")
    os.symlink("/dev/null", path + ".lock")
    with pytest.raises(AddressError, match="cannot listen"):
        bind_router(context, address)
    os.unlink(path + ".lock")


def test_a_full_disk(context: Context, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the lock's owner is a note; and what fails is told as an address that cannot be used."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    router = bind_router(context, address)
    with pytest.raises(AddressError, match="in use by a live engine, process unknown"):
        bind_router(context, address)
    router.close()
    monkeypatch.setattr(fcntl, "flock", full)
    with pytest.raises(AddressError, match=r"cannot listen on .*: No space left on device"):
        bind_router(context, address)
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    monkeypatch.setattr(tempfile, "gettempdir", full)
    with pytest.raises(AddressError, match=r"no directory for a socket could be created .*No space left"):
        private_ipc_address()


def test_private_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path(private_ipc_address().removeprefix("ipc://")).parent
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    inner = private_ipc_address()
    assert inner.startswith(f"ipc://{short}/")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * 100)  # too long: passed over
    other = private_ipc_address()
    assert not other.startswith("ipc:///x")
    for address in (inner, other, f"ipc://{short}/engine.sock"):
        check_address(address, binding=True)
        remove_private_address(address)
        assert not os.path.exists(os.path.dirname(address.removeprefix("ipc://")))


def test_addresses_whose_lock_is_free_are_removed_once_no_start_can_take_so_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folders = [Path(private_ipc_address().removeprefix("ipc://")).parent for _ in range(2)]
    for folder, age_s in zip(folders, (400, 900), strict=True):  # a start may take 300 s
        os.utime(folder, (time.time() - age_s,) * 2)
    last = Path(private_ipc_address().removeprefix("ipc://")).parent  # sweeps
    assert {folder for folder in (*folders, last) if folder.exists()} == {folders[0], last}


def test_a_users_directory_stays_whatever_its_name(context: Context) -> None:
    folder = Path(os.environ["TMPDIR"]) / "engine-core-mine"
    folder.mkdir()
    bind_router(context, f"ipc://{folder}/s.sock").close()
    assert list(folder.iterdir()) == []
    folder.rmdir()


def test_bounds_of_the_router(context: Context, address: str) -> None:
    router = bind_router(context, address)
    assert (router.socket.getsockopt(zmq.SNDHWM), router.socket.getsockopt(zmq.RCVHWM)) == (256, 16)
    assert router.socket.getsockopt(zmq.HANDSHAKE_IVL) == 2000
    with pytest.raises(zmq.ZMQError) as caught:
        router.socket.send_multipart([b"nobody", b"x"])  # an error, not silence
    assert caught.value.errno == zmq.EHOSTUNREACH
    dealer = connect_dealer(context, address)
    dealer.send(bytes(MAX_CLIENT_MESSAGE_BYTES + 1))  # its connection is cut ...
    dealer.send(b"x")  # ... and made anew
    assert [len(part) for part in router.socket.recv_multipart()][1:] == [1]
    dealer.close()
    router.close()


def test_nobody_listening_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match=r"no engine listens at ipc:///.*nobody\.sock: No such file"):
        check_listening(f"ipc://{tmp_path}/nobody.sock")
    with pytest.raises(EngineDeadError, match=r"no engine listens at tcp://127\.0\.0\.1:1: Connection refused"):
        check_listening("tcp://127.0.0.1:1")


def test_unread_messages_of_a_peer_are_few(context: Context, address: str) -> None:
    """libzmq keeps received messages in memory until the engine reads them, and counts messages, not bytes."""
    router = bind_router(context, address)
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.SNDHWM, 1)
    peer.connect(address)
    sent = 0
    while peer.poll(200, zmq.POLLOUT):
        peer.send(bytes(1 << 20), copy=False)
        sent += 1
        assert sent < 1000
    assert sent <= ROUTER_RECEIVE_MARK + 8, "the peer's own, and those in the kernel's buffers"
    for _ in range(sent):
        router.socket.recv_multipart()
    peer.close(0)
    router.socket.close(0)
    router.remove_files()
