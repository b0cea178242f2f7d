"""Objects of the user's own code, named as ``module:attribute``."""

import os
import sys
import traceback
from importlib import import_module
from inspect import iscoroutine
from typing import Any, TypeVar

from pillarbox.errors import ConfigError, PillarboxError
from pillarbox.hints import hint

T = TypeVar("T")


def load(target: str, kind: type[T], name: str) -> T:
    """The object that ``target`` names, or that the function ``target`` returns.

    name: of such an object, for errors: ``a Relay``.
    """
    found = load_object(target, name)
    if isinstance(found, kind) and not isinstance(found, type):
        return found
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{target} is a {_kind(found)}; name {name}, or a function that returns one")
    try:
        made = found()
    except PillarboxError:
        raise
    except Exception as error:
        raise _broken(f"calling {target}", error) from error
    if iscoroutine(made):
        made.close()
        raise ConfigError(f"{target} is an async function; make it a plain one that returns {name}")
    if not isinstance(made, kind):
        raise ConfigError(f"{target} returned a {_kind(made)}; return {name}")
    return made


def load_object(target: str, name: str) -> Any:
    """The object that ``target`` names; modules in the working directory are found too."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{target!r} does not name {name}; write MODULE:ATTRIBUTE, for example shop.main:orders")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = import_module(module_name)
    except PillarboxError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"there is no module {error.name!r}; start the command in the folder that contains it, or install it"
            ) from None
        raise _broken(f"importing {module_name}", error) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            public = [each for each in dir(found) if not each.startswith("_")]
            raise ConfigError(f"{module_name} has no {path!r}; {hint(attribute, public, 'correct the name')}")
        found = getattr(found, attribute)
    return found


def _kind(value: object) -> str:
    return "class" if isinstance(value, type) else type(value).__name__


def _broken(doing: str, error: Exception) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return ConfigError(f"{doing} failed with {type(error).__name__}: {error}{where}; correct your code")
