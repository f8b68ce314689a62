"""A real browser for the tests: Chromium without a window, installed where we may, spoken to through a pipe."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real import need

_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-unsafe-swiftshader",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--allow-file-access-from-files", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One tab. Everything that the page logs as an error, and every address that it asks for, is kept.

    Attributes:
        errors: exceptions, console.error and failed requests of the pages so far.
        requests: addresses asked for so far, the pages' own included.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._unread, self._loaded = 0, b"", False
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the Chrome DevTools Protocol; return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, seconds: float = 30) -> None:
        """Load a page in a window of this size and wait until it is loaded."""
        self._loaded = False
        self.look(width=width, height=height, dark=dark)
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + seconds
        while not self._loaded:
            assert time.monotonic() < deadline, f"{url} did not load within {seconds} s"
            self.evaluate("0")  # reads the events that came before its answer
            time.sleep(0.02)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Change the size of the window, the colour scheme, and the medium: screen or print."""
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page; a promise is awaited."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not true after {seconds} s: {condition}"
            time.sleep(0.1)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Save what the window shows as a PNG; with `whole`, the page to its end."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **(self._all() if whole else {}))
        file.write_bytes(base64.b64decode(picture["data"]))

    def _all(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def pdf(self, file: Path) -> None:
        """Print the page."""
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return answer

    def _note(self, event: str, about: Mapping[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}".strip())


@contextmanager
def browser(*, offline: bool = False) -> Iterator[Browser]:
    """Chromium, or the test is skipped with the reason; with REQUIRE_REAL set, it fails.

    Args:
        offline: without any network, the machine's own included; pages are files then.
    """
    need({"chromium": ["chromium"], "fonts-dejavu-core": ["chromium"]})
    program = shutil.which("chromium")
    assert program is not None
    home = tempfile.mkdtemp(prefix="browser_")
    inward, outward = os.pipe(), os.pipe()  # the browser reads from its file 3, and writes to its file 4
    network = ["unshare", "--net"] if offline else []
    places = f'exec "$@" 3<&{inward[0]} 4>&{outward[1]}'
    command = [*network, "bash", "-c", places, "bash", program, *_OPTIONS, f"--user-data-dir={home}"]
    environment = {**os.environ, "HOME": home}
    with Path(home, "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            pass_fds=(inward[0], outward[1]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    os.close(inward[0])
    os.close(outward[1])
    try:
        yield Browser(inward[1], outward[0])
    finally:
        os.close(inward[1])  # which ends the browser
        os.close(outward[0])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(home, ignore_errors=True)
