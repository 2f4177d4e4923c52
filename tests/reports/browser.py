"""A page in headless Chromium, driven through its debugging pipe: descriptors 3 and 4, JSON between zero bytes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
_SECONDS = 60


@dataclass
class Page:
    """An open page.

    Attributes:
      complaints: errors and warnings of the console, exceptions, and what the browser logs, as a blocked script.
      requests: addresses that the page asked for.
    """

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _write: int = -1
    _read: int = -1
    _session: str | None = None
    _count: int = 0
    _buffer: bytes = b""

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def key(self, name: str, **more: Any) -> None:
        """Press and release a key: a letter, "Tab", "Enter" or "Escape"."""
        text = {"text": {"Enter": "\r"}.get(name, name)} if len(name) == 1 or name == "Enter" else {}
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        event = {"key": name, "windowsVirtualKeyCode": codes.get(name, ord(name[0].upper())), **more}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; events that come before it are noticed."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._until("id", self._count)
        assert "error" not in answer, answer
        return answer["result"]

    def until(self, method: str) -> None:
        """Wait for an event."""
        self._until("method", method)

    def _until(self, key: str, value: Any) -> dict[str, Any]:
        """The next message with this value, after those that come before it are noticed."""
        end = time.monotonic() + _SECONDS
        while True:
            message = self._next(end)
            self._notice(message)
            if message.get(key) == value:
                return message

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _notice(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(details["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(details["args"]))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(details["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])


@contextlib.contextmanager
def open_page(
    place: Path | str, *, dark: bool = False, width: int | None = None, profile: Path | None = None
) -> Iterator[Page]:
    """Open a file, or a URL and a folder for the browser's profile, in a browser that ends with the block."""
    assert BROWSER is not None
    url = place.as_uri() if isinstance(place, Path) else place
    profile = profile or Path(place).parent / "browser"
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()

    flags = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe --no-first-run"
    )
    flags += " --disable-extensions --disable-background-networking"
    connected = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'  # they are 3 or more: none is lost
    process = subprocess.Popen(
        ["bash", "-c", connected, BROWSER, *flags.split(), f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser), os.close(from_browser)
    page = Page(_write=write, _read=read)
    try:
        target = page.call("Target.createTarget", url="about:blank")["targetId"]
        page._session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        if dark:
            wanted = [{"name": "prefers-color-scheme", "value": "dark"}]
            page.call("Emulation.setEmulatedMedia", features=wanted)
        if width is not None:
            size = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": True}
            page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Page.navigate", url=url)
        page.until("Page.loadEventFired")
        yield page
    finally:
        process.kill()
        process.wait()
        os.close(write), os.close(read)
