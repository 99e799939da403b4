"""A headless Chromium, driven over its debugging pipe: JSON messages that end in a zero byte, on two descriptors."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 60.0
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
)


def find_browser() -> str | None:
    """The path of a Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Page:
    """One page. Everything it writes to its console as an error is kept."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.errors: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._received = b""
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Runtime.enable")
        self._call("Log.enable")
        self._call("Page.enable")

    def open(self, url: str, width: int, height: int) -> None:
        """Open a page."""
        self.resize(width, height)
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        """Give the window a size in CSS pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _PATIENCE_S
        while not self.run(script):
            assert time.monotonic() < end, f"{script} is not true: {self.run('document.body.innerText')!r:.500}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        """Press the enter key."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self._call("Input.dispatchKeyEvent", type="keyDown", **key)
        self._call("Input.dispatchKeyEvent", type="keyUp", **key)

    def set_dark(self, is_dark: bool) -> None:
        """Choose between the dark and the light style."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Close the browser."""
        self._session = ""
        self._call("Browser.close")

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"])[:500])
            entry = answer.get("params", {}).get("entry", {})
            if answer.get("method") == "Log.entryAdded" and entry["level"] == "error":
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def _receive(self) -> Any:
        while b"\0" not in self._received:
            assert select.select([self._from], [], [], _PATIENCE_S)[0], "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._received += data
        line, _, self._received = self._received.partition(b"\0")
        return json.loads(line)


@contextlib.contextmanager
def browser(path: str) -> Iterator[Page]:
    """A page of a Chromium of its own, with a profile of its own."""
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    # The shell puts the two ends where the browser looks for them.
    command = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["/bin/bash", "-c", command, path, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile},
        )
        try:
            os.close(their_in)
            os.close(their_out)
            page = Page(our_out, our_in)
            yield page
            page.close()
            process.wait(_PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            os.close(our_out)
            os.close(our_in)
