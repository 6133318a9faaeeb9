"""A headless Chromium, driven over a pipe by the DevTools protocol: no port, no driver."""

from __future__ import annotations

import base64
import io
import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TIMEOUT = 60.0  # seconds for one answer: far above the second it takes, for a busy machine

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One page of a running browser.

    Attributes:
        requests: URLs that the page asked for, itself included.
        complaints: What the page wrote to the console, and exceptions that nothing caught.
    """

    def __init__(self, write_end: int, read_end: int) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._write_end = write_end
        self._read_end = read_end
        self._selector = selectors.DefaultSelector()
        self._selector.register(read_end, selectors.EVENT_READ)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the theme the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},  # nothing glides into a picture
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, path: Path) -> None:
        """Open a file and wait until it has loaded, its videos and plots included."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.settle()

    def settle(self) -> None:
        """Wait until scripts have run, every video shows a frame and the page was painted."""
        self.evaluate(
            """new Promise((done) => {
              const ready = () => document.readyState === "complete"
                && document.documentElement.dataset.ready === "true"
                && [...document.querySelectorAll("video[src]")].every(
                  (video) => video.readyState >= 2 && !video.seeking)
                && [...document.images].every((image) => image.complete)
                && [...document.querySelectorAll(".plot .main-svg")].every(
                  (plot) => plot.clientWidth <= plot.closest(".plot").clientWidth);
              const look = () => ready()
                ? requestAnimationFrame(() => requestAnimationFrame(() => done(true)))
                : requestAnimationFrame(look);
              look();
            })"""
        )

    def screenshot(self, selector: str | None = None) -> np.ndarray:
        """Return the whole page, or one element of it, as [height, width, 3] bytes."""
        clip = None
        if selector is not None:
            box = self.evaluate(
                f"""(() => {{
                  const element = document.querySelector({json.dumps(selector)});
                  const box = element.getBoundingClientRect();
                  return [box.x + scrollX, box.y + scrollY, box.width, box.height];
                }})()"""
            )
            clip = {**dict(zip(("x", "y", "width", "height"), box, strict=True)), "scale": 1}
        options = {"captureBeyondViewport": True} | ({"clip": clip} if clip else {})
        shot = self.call("Page.captureScreenshot", format="png", **options)
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB"))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the browser gave no answer in {TIMEOUT:g} s")
            chunk = os.read(self._read_end, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded":
                self.complaints.append(str(parameters["entry"]))
            case _:
                pass


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[Page]:
    """Start a browser with a fresh profile, give its page, and end it."""
    read_end, to_browser = os.pipe()
    from_browser, write_end = os.pipe()
    # The protocol wants the pipes at descriptors 3 and 4 of the browser.
    wiring = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'
    process = subprocess.Popen(
        ["/bin/sh", "-c", wiring, program, *_FLAGS, f"--user-data-dir={profile}"],
        stdin=read_end,
        stdout=write_end,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_end)
    os.close(write_end)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)  # the browser ends when its pipe does
        os.close(from_browser)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
