"""Several observers as one."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from pillarbox.errors import ConfigError
from pillarbox.observe.observer import Observer

log = logging.getLogger(__name__)

T = TypeVar("T")
Hook = Callable[..., None]

_HOOKS: Final = tuple(name for name in vars(Observer) if not name.startswith("_"))


class Observers(Observer):
    """Passes each hook on to the observers that override it."""

    def __init__(self, observers: Iterable[Observer] = (), logger: logging.Logger = log) -> None:
        found = [_checked(observer) for observer in observers]
        self._hooks: dict[str, Hook] = {}
        for name in _HOOKS:
            hooks = [each[name] for each in found if name in each]
            if hooks:
                self._hooks[name] = _each(hooks, logger)
                setattr(self, name, self._hooks[name])

    def follow(self, call: str) -> bool:
        """Whether anybody wants to learn of this call."""
        return not self._hooks.keys().isdisjoint((f"before_{call}", f"after_{call}", "call_failed"))

    def wants(self, hook: str) -> bool:
        """Whether an observer overrides this hook."""
        return hook in self._hooks

    async def report(
        self,
        call: str,
        arguments: tuple[Any, ...],
        awaited: Awaitable[T],
        told: Callable[[T], tuple[Any, ...]] = lambda result: (result,),
    ) -> T:
        """Await a call and report it. ``told``: what the ``after_...`` hook learns of the result."""
        before, after = self._hooks.get(f"before_{call}"), self._hooks.get(f"after_{call}")
        if before is not None:
            before(*arguments)
        begun = time.perf_counter()
        try:
            result = await awaited
        except BaseException as error:
            self.call_failed(call, arguments, error, time.perf_counter() - begun)
            raise
        seconds = time.perf_counter() - begun
        if after is not None:
            after(*arguments, *told(result), seconds)
        return result


def _checked(observer: Observer) -> dict[str, Hook]:
    """The hooks that an observer overrides, by name."""
    kind = type(observer).__name__
    if not isinstance(observer, Observer):
        raise ConfigError(f"{kind} is no observer; make it a subclass of pillarbox.observe.Observer")
    for name in dir(observer):
        if name.startswith(("before_", "after_")) and name not in _HOOKS:
            near = get_close_matches(name, _HOOKS, 1)
            hint = f"did you mean '{near[0]}'?" if near else "see pillarbox.observe.Observer for the hooks"
            raise ConfigError(f"{kind}.{name} is no hook of an observer; {hint}")
    hooks = {name: getattr(observer, name) for name in _HOOKS}
    return {name: hook for name, hook in hooks.items() if getattr(hook, "__func__", hook) is not vars(Observer)[name]}


def _each(hooks: Sequence[Hook], logger: logging.Logger) -> Hook:
    failed: set[Hook] = set()

    def call_each(*arguments: Any) -> None:
        for hook in hooks:
            try:
                hook(*arguments)
            except Exception:
                if hook not in failed:
                    failed.add(hook)
                    name = getattr(hook, "__qualname__", repr(hook))
                    logger.exception(
                        "%s raised; its further errors are not logged", name, extra={"action": "observer_failed"}
                    )

    return call_each
