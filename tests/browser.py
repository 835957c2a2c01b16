"""A real headless browser without network, driven over a pipe: opens a file, asks the page, takes its picture."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.needs import need

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
NO_NETWORK = ("unshare", "--map-root-user", "--net")
ANSWER_SECONDS = 60.0


def find_browser() -> str:
    """The browser's path. Skips the test where there is none or no way to cut it off; under CI that is a failure."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    need(path, f"headless browser on PATH ({', '.join(NAMES)}; Debian: chromium-headless-shell)")
    cut_off = subprocess.run([*NO_NETWORK, "true"], capture_output=True).returncode == 0
    need(cut_off, f"permission for `{' '.join(NO_NETWORK)}`, without which the browser would have a network")
    assert path is not None
    return path


class Page:
    """One open page. ``requests``: every address that it asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: dict[str, str] = {}
        self.requests: list[str] = []
        self._events: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int) -> None:
        """Load a file at a width in pixels and wait until it is whole."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + ANSWER_SECONDS
        while "Page.loadEventFired" not in self._events:
            self._take(self._read(deadline))

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression in the page."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, also what lies below the window, as PNG."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._read(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._take(answer)

    def _take(self, event: dict[str, Any]) -> None:
        self._events.append(str(event.get("method")))
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._from, 1 << 16) if ready else b""
            assert part, "the browser ended or does not answer"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """A browser in a network namespace of its own, with its files below ``folder``."""
    browser = find_browser()
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    pipes = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'  # the numbers that the browser expects
    with (
        (folder / "browser.log").open("wb") as log,
        subprocess.Popen(
            ["bash", "-c", pipes, "browser", *NO_NETWORK, browser, *flags],
            pass_fds=(commands_out, answers_in),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(folder)},
        ) as process,
    ):
        os.close(commands_out)
        os.close(answers_in)
        try:
            yield Page(commands_in, answers_out)
        finally:
            os.close(commands_in)  # it ends when its pipe does
            os.close(answers_out)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
