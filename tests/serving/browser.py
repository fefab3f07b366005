"""A headless Chromium, driven through ChromeDriver by the WebDriver protocol."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--force-prefers-reduced-motion=0",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of element references, a constant of the protocol


def missing() -> str | None:
    """What has to be installed for a browser test; None: nothing."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(lacking)} (Debian: chromium, chromium-driver)" if lacking else None


class Browser:
    """One tab. Raises what ChromeDriver answers as RuntimeError."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def _do(self, method: str, path: str, **body: Any) -> Any:
        answer = self._http.request(method, f"/session/{self._session}{path}", json=body if method == "POST" else None)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {value['error']}: {value['message'][:500]}")
        return value

    def open(self, url: str) -> None:
        self._do("POST", "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that the body of a function returns."""
        return self._do("POST", "/execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, *arguments: Any, seconds: float = 60) -> Any:
        """Until `run` gives something true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script, *arguments):
                return value
            time.sleep(0.1)
        raise AssertionError(f"the page has not come to: {script}\n{self.run('return document.body.innerText')}")

    def _element(self, css: str) -> str:
        return str(self._do("POST", "/element", using="css selector", value=css)[_ELEMENT])

    def type(self, css: str, text: str) -> None:
        self._do("POST", f"/element/{self._element(css)}/value", text=text)

    def click(self, css: str) -> None:
        self._do("POST", f"/element/{self._element(css)}/click")

    def press(self, *keys: str) -> None:
        """To the element that has the focus."""
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._do("POST", "/actions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    def log(self) -> list[str]:
        """What went wrong in the page since the last call."""
        return [entry["message"] for entry in self._do("POST", "/se/log", type="browser") if entry["level"] == "SEVERE"]

    def screenshot(self) -> bytes:
        return base64.b64decode(self._do("GET", "/screenshot"))


@contextmanager
def browsing(width: int = 1440, height: int = 1280, *flags: str) -> Iterator[Browser]:
    profile = tempfile.mkdtemp()
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        line = next(each for each in driver.stdout if "successfully on port" in each)
        http = httpx.Client(base_url=f"http://127.0.0.1:{line.rstrip('. ' + chr(10)).split()[-1]}", timeout=90)
        arguments = [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *flags]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
        browser = Browser(http, answer["sessionId"])
        try:
            yield browser
        finally:
            http.delete(f"/session/{answer['sessionId']}")
            http.close()
    finally:
        driver.terminate()
        driver.wait(30)
        shutil.rmtree(profile, ignore_errors=True)
