"""The systemd unit and the container file: what can be checked without installing them."""

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.tools.test_cli import command, environment
from tools.notify import notify

pytestmark = pytest.mark.checkout  # deploy/

ROOT = Path(__file__).resolve().parents[2]
UNIT, CONTAINER = ROOT / "deploy" / "engine-core.service", ROOT / "deploy" / "Containerfile"


def options_of(text: str) -> list[str]:
    """Return the serve command's flags in a file."""
    (line,) = re.findall(r"(?m)^(?:ExecStart=|ENTRYPOINT ).*serve.*$", text)
    return re.findall(r"--[a-z-]+", line)


@pytest.mark.parametrize("file", [UNIT, CONTAINER], ids=lambda file: file.name)
def test_serve_has_the_options_that_are_given(file: Path) -> None:
    done = subprocess.run(command("serve", "--help"), env=environment(), capture_output=True, text=True, check=True)
    options = options_of(file.read_text())
    assert "--listen" in options
    assert [flag for flag in options if flag not in done.stdout] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/engine-core/bin/engine-core", "/bin/true"))  # must exist
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]  # 20: exposure 2.0
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_serve_tells_the_service_manager(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(20)
        with subprocess.Popen(
            command("serve", "--executor", "fake", "--listen", f"ipc://{tmp_path}/e"),
            env=environment() | {"NOTIFY_SOCKET": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as server:
            states = [manager.recv(1000).decode()]
            while "READY=1" not in states[-1]:
                states.append(manager.recv(1000).decode())
            server.terminate()
            assert manager.recv(1000) == b"STOPPING=1"
            assert server.wait(20) == 0
    assert states[0].startswith("STATUS=starting: ")
    assert "STATUS=ready at" in states[-1]


def test_no_manager_and_a_dead_one_are_no_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")
