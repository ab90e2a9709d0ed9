"""Chromium without a window, driven through the pipe of its DevTools protocol: nothing to install but the browser."""

import json
import os
import shutil
import subprocess
import tempfile

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")


class Page:
    """One page: `run` evaluates JavaScript in it; `events` are all messages that came on their own."""

    def __init__(self, path):
        self.events = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The protocol is spoken on the descriptors 3 and 4, which only a shell can set.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = [BROWSER, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=path.as_uri())
        self._wait_for("Page.loadEventFired")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.close(self._write)  # the browser ends when its pipe does
        self._process.wait(30)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def named(self, method):
        return [event["params"] for event in self.events if event.get("method") == method]

    def _wait_for(self, method):
        while not self.named(method):
            self.events.append(self._next())

    def _next(self):
        while b"\0" not in self._buffer:
            received = os.read(self._read, 2**16)
            assert received, "the browser went away"
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
