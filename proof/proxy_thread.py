"""Proxies for a harness that is not asynchronous."""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from proof.proxy import Proxy

T = TypeVar("T")


class ProxyThread:
    """An event loop in its own thread for all proxies, so that a busy harness does not slow them down.

    ``thread.run(proxy.heal())`` blocks until it is done.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proof-proxy", daemon=True)
        self._proxies: list[Proxy] = []
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, target_host: str, target_port: int, *, port: int = 0, seed: int = 0) -> Proxy:
        """A started proxy. It is closed with the thread."""
        proxy = Proxy(target_host, target_port, port=port, seed=seed)
        self._proxies.append(proxy)
        return self.run(proxy.start())

    def run(self, change: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(change, self._loop).result()

    def close(self) -> None:
        """Safe to call twice."""
        if self._loop.is_closed():
            return
        for proxy in self._proxies:
            self.run(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
