"""A real HTTP server with ranged reads, in a thread, that can be told to misbehave."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


class FileServer:
    """Files by name. faults: what happens to the next requests, one entry each; see `_answer`.

    requests: (name, value of Range) of all so far. token: what an Authorization header has to be.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: deque[str] = deque()
        self.always = ""
        self.requests: list[tuple[str, str]] = []
        self.token = ""
        self.url = ""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name, given = request.match_info["name"], request.headers.get("Range", "")
        self.requests.append((name, given))
        fault = self.faults.popleft() if self.faults else self.always
        if self.token and request.headers.get("Authorization") != self.token:
            return web.Response(status=401)
        if fault.isdigit():
            return web.Response(status=int(fault))
        if fault == "slow":
            await asyncio.sleep(3)
        if name.endswith("/") or not name:
            links = "".join(f'<a href="{one}">{one}</a>' for one in self.files)
            return web.Response(text=f"<html>{links}</html>", content_type="text/html")
        data = self.files.get(name)
        if data is None:
            return web.Response(status=404)
        etag = {"ETag": f'"{hashlib.md5(data).hexdigest()}"'}
        if fault == "whole" or not given:
            return web.Response(body=data, headers=etag)
        first, last = (int(end) for end in given.removeprefix("bytes=").split("-"))
        if first >= len(data):
            return web.Response(
                status=416, headers={"Content-Range": f"bytes */{len(data)}", **etag}
            )
        last = min(last, len(data) - 1)
        body = data[first : last + 1]
        if fault == "short":
            body = body[:-1]
        headers = {
            "Content-Range": f"bytes {first}-{last}/{len(data)}",
            "Content-Length": str(last + 1 - first - (fault == "short")),
            **etag,
        }
        answer = web.StreamResponse(status=206, headers=headers)
        await answer.prepare(request)
        if fault == "cut":
            await answer.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.abort()
            return answer
        await answer.write(body)
        return answer


@contextmanager
def serving() -> Iterator[FileServer]:
    """A server on a port of this machine, until the block ends."""
    server, loop, ready = FileServer(), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{name:.*}", server._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
