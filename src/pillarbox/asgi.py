"""The lifespan of an ASGI application that runs relays and consumers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol, runtime_checkable

from pillarbox.errors import ConfigError

_REMEDY: Final = "pass relays, consumers, and lifespans of your own"


@runtime_checkable
class Service(Protocol):
    """A relay, a consumer, or anything else that is started and stopped."""

    def start(self) -> Awaitable[object]: ...

    def stop(self) -> Awaitable[object]: ...


def lifespan(
    *parts: Service | Callable[[Any], AbstractAsyncContextManager[Any]],
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """For ``FastAPI(lifespan=lifespan(relay, consumer))``, or any other ASGI application: they run as long as it does.

    The application starts at once; they connect in the background. At the end they stop together, within the longest
    ``grace`` of them. parts: relays, consumers, and lifespans of your own, which are entered before the others and left
    after them; the states that they give are merged.
    """
    for part in parts:
        _check(part)

    @asynccontextmanager
    async def run(app: Any) -> AsyncIterator[dict[str, Any]]:
        state: dict[str, Any] = {}
        async with AsyncExitStack() as stack:
            for part in parts:
                if not isinstance(part, Service):
                    given = await stack.enter_async_context(part(app))
                    state.update(given if isinstance(given, Mapping) else {})
            started: list[Service] = []
            stack.push_async_callback(_stop, started)
            for part in parts:
                if isinstance(part, Service):
                    started.append(part)
                    await part.start()
            yield state

    return run


async def _stop(services: list[Service]) -> None:
    ended = await asyncio.gather(*(service.stop() for service in services), return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException):
            raise error


def _check(part: Any) -> None:
    if isinstance(part, type):
        raise ConfigError(f"lifespan was given the class {part.__name__}; {_REMEDY}")
    if not (isinstance(part, Service) or callable(part)):
        raise ConfigError(f"lifespan was given a {type(part).__name__}; {_REMEDY}")
