"""A web shop behind the middleware, for tests."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from httpx import ASGITransport, AsyncClient, Response
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, StreamingResponse
from starlette.responses import Response as Answer
from starlette.routing import Route

from pillarbox import Idempotency
from tests.idempotency.places import Place


def user_of(request: Request) -> str | None:
    return request.headers.get("user")


class Shop:
    """``POST /orders`` writes an order with the label in its body, and then does what the body asks for.

    hook: awaited after the write. background: run after the answer.
    """

    def __init__(self, place: Place, handle: Any, make: type[Idempotency] = Idempotency, **settings: Any) -> None:
        self.place = place
        self.handle = handle
        self.once = make(handle, scope=user_of, prefix=place.prefix, **settings)
        self.calls = 0
        self.hook: Callable[[Any], Any] | None = None
        self.background: Callable[[Any], Any] | None = None
        self.app = Starlette(routes=[Route("/orders", self.create, methods=["POST", "GET"])])
        self.app.add_middleware(self.once.middleware, paths=["/orders"])

    async def create(self, request: Request) -> Answer:
        asked = await request.json()
        tx = self.once.transaction(request.scope)
        self.calls += 1
        await self.place.order(tx, asked["label"])
        if self.hook is not None:
            await self.hook(tx)
        background = BackgroundTask(self.background, tx) if self.background is not None else None
        match asked.get("do"):
            case "raise":
                raise LookupError("no such item")
            case "refuse":
                raise HTTPException(402, "no money")
            case "redirect":
                return RedirectResponse("/elsewhere")
            case "stream":
                return StreamingResponse(self._lines(asked["lines"]), 201, background=background)
        answer = JSONResponse({"call": self.calls, "name": "lämp"}, 201, background=background)
        answer.headers.update({"location": "/orders/7", "x-own": "1", "connection": "x-hop", "x-hop": "1"})
        answer.set_cookie("visit", "1")
        answer.set_cookie("other", "2")
        answer.headers.append("link", "</a>")
        answer.headers.append("link", "</b>")
        return answer

    async def _lines(self, count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            yield b"line %d\n" % number
        if not count:
            yield b"a line, and never another one"
            await asyncio.Event().wait()

    async def post(
        self, key: str | None, user: str | None = "ann", raw: bytes | None = None, path: str = "/orders", **asked: Any
    ) -> Response:
        headers = {name: value for name, value in (("idempotency-key", key), ("user", user)) if value is not None}
        transport = ASGITransport(self.app, raise_app_exceptions=False)
        async with AsyncClient(transport=transport, base_url="http://shop") as client:
            body = json.dumps({"label": key, **asked}).encode() if raw is None else raw
            return await client.post(path, content=body, headers=headers)


def stored_part(response: Response) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    """Status, body and headers, without those that are not stored, and without the mark of a replay."""
    left_out = (b"set-cookie", b"connection", b"x-hop", b"idempotent-replayed")
    headers = [(name, value) for name, value in response.headers.raw if name not in left_out]
    return response.status_code, response.content, headers
