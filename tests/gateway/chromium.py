"""A headless Chromium of the machine, driven over its debugging pipe."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

HOST = "127.0.0.1"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
MAX_ANSWER = 64 * 1024 * 1024


def chromium() -> str | None:
    """Its path, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page. `faults` are what its scripts raised or wrote as an error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict]] = {}
        self._session: str | None = None
        self._loaded = asyncio.Event()
        self.faults: list[str] = []
        self.requested: list[str] = []

    async def call(self, method: str, **parameters: object) -> dict:
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        return await answer

    async def read(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if "error" in message:
                    answer.set_exception(RuntimeError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])
            elif message["method"] == "Runtime.exceptionThrown":
                self.faults.append(json.dumps(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["level"] == "error":
                    self.faults.append(f"{entry['text']} {entry.get('url', '')}")
            elif message["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif message["method"] == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])

    async def open(self, url: str, width: int, height: int) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await self._loaded.wait()

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    async def evaluate(self, script: str) -> object:
        """The value of an expression, awaited where it is a promise."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true, asked again whenever the page has changed."""
        await self.evaluate(
            "new Promise((resume) => {"
            f"  const look = () => {{ if ({condition}) {{ watch.disconnect(); resume(true); }} }};"
            "  const watch = new MutationObserver(look);"
            "  watch.observe(document, { subtree: true, childList: true, attributes: true,"
            "    characterData: true });"
            "  look(); })"
        )

    async def screenshot(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))


@asynccontextmanager
async def browser(program: str, folder: Path) -> AsyncIterator[Page]:
    """A browser of its own, with its profile in `folder`."""
    to_browser, ours_out = os.pipe()
    ours_in, from_browser = os.pipe()
    words = [
        f'exec 3<&{to_browser} 4>&{from_browser}; exec "$0" "$@"',
        program,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        # Nothing but this machine is there for it.
        f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {HOST}",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    ]
    process = await asyncio.create_subprocess_exec(
        "/bin/bash",
        "-c",
        *words,
        pass_fds=(to_browser, from_browser),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_ANSWER)
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb")
    )
    outgoing, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(), os.fdopen(ours_out, "wb")
    )
    page = Page(reader, asyncio.StreamWriter(outgoing, protocol, None, loop))
    reading = asyncio.create_task(page.read())
    try:
        yield page
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        incoming.close()
        outgoing.close()
        process.kill()
        await process.wait()
