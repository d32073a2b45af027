"""Debian's chromium without a window, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DESK, PHONE = 1280, 390
"""Pixels of a screen's width."""


class Browser:
    """One open tab."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest = send, receive, b""
        self._numbers, self._session = itertools.count(1), ""
        tab = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Accessibility"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **values: Any) -> Any:
        """Send a command, and return its answer."""
        number = next(self._numbers)
        of = {"sessionId": self._session} if self._session else {}
        os.write(
            self._send, json.dumps({"id": number, "method": method, "params": values, **of}).encode() + b"\0"
        )
        while (found := self._read()).get("id") != number:
            pass
        assert "error" not in found, found
        return found["result"]

    def _read(self) -> dict[str, Any]:
        pieces = [self._rest]
        while b"\0" not in pieces[-1]:
            pieces.append(os.read(self._receive, 2**16))
            assert pieces[-1], "the browser has gone"
        raw, _, self._rest = b"".join(pieces).partition(b"\0")
        found: dict[str, Any] = json.loads(raw)
        return found

    def size(self, width: int, height: int = 900) -> None:
        """Look as on a screen of this size; below 600 pixels as on a phone."""
        values = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **values)

    def colours(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Open a page, and return when it is there."""
        whole = "false" if address == "about:blank" else "true"
        self.ask("Page.navigate", url=address)
        self.until(f"document.readyState === 'complete' && (location.href !== 'about:blank') === {whole}")

    def value(self, expression: str) -> Any:
        """Return the value of an expression on the page, as JSON has it."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression on the page holds."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.05)

    def press(self, key: str, code: int) -> None:
        """Press a key and let it go."""
        values = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **values, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **values)

    def spoken(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Return role, name and properties of whatever a screen reader is told of."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        return [
            (
                node["role"]["value"],
                node.get("name", {}).get("value", ""),
                {one["name"]: one["value"].get("value") for one in node.get("properties", [])},
            )
            for node in nodes
            if not node.get("ignored")
        ]

    def picture(self, place: Path) -> None:
        """Write a picture of the whole page."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        place.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """Start chromium; it ends with the block.

    Args:
        profile: an empty folder for it.
    """
    assert CHROMIUM is not None
    pipes = [*os.pipe(), *os.pipe()]
    # Numbers that are not 3 and 4, which are those that the browser reads and writes.
    high = [fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 64) for pipe in pipes]
    for pipe in pipes:
        os.close(pipe)
    to_browser, send, receive, from_browser = high
    options = "--headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --remote-debugging-pipe"
    script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    command = ["bash", "-c", script, "bash", CHROMIUM, *options.split(), f"--user-data-dir={profile}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), stdout=quiet, stderr=quiet)
    os.close(to_browser)
    os.close(from_browser)
    try:
        found = Browser(send, receive)
        yield found
        found._session = ""
        found.ask("Browser.close")
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        os.close(send)
        os.close(receive)
