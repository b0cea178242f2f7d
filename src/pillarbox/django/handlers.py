"""Handlers that use Django's connections."""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from asgiref.sync import sync_to_async

from pillarbox.drivers.django import close_old_connections
from pillarbox.publishers import handlers as plain

__all__ = ["Handlers"]


class Handlers(plain.Handlers):
    """Handlers whose connections are looked after as those of a view are: before and after each call, those that are
    too old or were ended by the server are closed.

    The settings are those of :class:`pillarbox.Handlers`.
    """

    def on(self, *types: str, **options: Any) -> Callable[[Any], Any]:
        """As :meth:`pillarbox.Handlers.on`."""
        return _wrapping(super().on(*types, **options))

    def on_batch(self, *types: str, **options: Any) -> Callable[[Any], Any]:
        """As :meth:`pillarbox.Handlers.on_batch`."""
        return _wrapping(super().on_batch(*types, **options))


def _wrapping(register: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        register(_with_fresh_connections(function) if callable(function) else function)
        return function

    return decorate


def _with_fresh_connections(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # An object with __call__ is async if that method is.
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        close = sync_to_async(close_old_connections)

        async def awaited(given: Any) -> Any:
            await close()
            try:
                return await function(given)
            finally:
                await close()

        return update_wrapper(awaited, function)

    def called(given: Any) -> Any:
        close_old_connections()
        try:
            return function(given)
        finally:
            close_old_connections()

    return update_wrapper(called, function)
