import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pillarbox.errors import ConfigError, PillarboxError
from pillarbox.imports import load, load_object
from pillarbox.publisher import Publisher
from pillarbox.publishers.memory import MemoryPublisher

SHOP = """
from pillarbox.errors import ConfigError
from pillarbox.publishers.memory import MemoryPublisher

publisher = MemoryPublisher()
number = 7

class inner:
    headers = len

def make():
    return publisher

async def make_async():
    return publisher

def make_number():
    return 7

def fail():
    raise RuntimeError("no such secret")

def refuse():
    raise ConfigError("a sentence of ours")
"""

Module = Callable[[str, str], None]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Writes a module into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_an_object_of_a_module_in_the_working_directory(module: Module) -> None:
    module("own_shop", SHOP)
    assert isinstance(load_object("own_shop:publisher", "a Publisher"), MemoryPublisher)
    assert load_object("own_shop:inner.headers", "a header builder") is len


def test_an_object_or_a_function_that_returns_one(module: Module) -> None:
    module("own_shop", SHOP)
    made = load("own_shop:make", MemoryPublisher, "a Publisher")
    assert made is load("own_shop:publisher", MemoryPublisher, "a Publisher")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("own_shop", "'own_shop' does not name a Publisher; write MODULE:ATTRIBUTE"),
        (":publisher", "does not name a Publisher"),
        ("own_shop:", "does not name a Publisher"),
        ("own_shpo:publisher", "there is no module 'own_shpo'; start the command in the folder that contains it"),
        ("own_shop:publishre", r"own_shop has no 'publishre'; did you mean 'publisher'\?"),
        ("own_shop:inner.x", "own_shop has no 'inner.x'; correct the name"),
        ("own_shop:number", "own_shop:number is a int; name a Publisher, or a function that returns one"),
        ("own_shop:MemoryPublisher", "own_shop:MemoryPublisher is a class; name a Publisher"),
        ("own_shop:make_number", "own_shop:make_number returned a int; return a Publisher"),
        ("own_shop:make_async", "make_async is an async function; make it a plain one that returns a Publisher"),
        ("own_shop:fail", r"calling own_shop:fail failed with RuntimeError: .* \(own_shop.py, line \d+\); correct"),
        ("own_shop:refuse", "a sentence of ours"),
    ],
)
def test_a_wrong_target_is_one_sentence(module: Module, target: str, message: str) -> None:
    module("own_shop", SHOP)
    with pytest.raises(ConfigError, match=message):
        load(target, Publisher, "a Publisher")  # type: ignore[type-abstract]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"importing broken_shop failed with ZeroDivisionError: .* \(broken_shop.py, line 1\)"),
        ("import not_there_at_all", "importing broken_shop failed with ModuleNotFoundError: No module named"),
        ("from pillarbox.errors import ConfigError; raise ConfigError('ours')", "^ours$"),
    ],
)
def test_a_module_that_cannot_be_imported(module: Module, text: str, message: str) -> None:
    module("broken_shop", text)
    with pytest.raises(PillarboxError, match=message):
        load_object("broken_shop:publisher", "a Publisher")
