"""Every store, publisher and source must have a contract class that pytest collects."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import pillarbox
from pillarbox.conformance import PublisherContract, SourceContract, StoreContract

HERE = Path(__file__).parent
SHARED = {"sql", "composed"}  # parts of several adapters
WORK = {"Store": "settle", "Publisher": "publish", "Source": "receive"}  # the method that every adapter has
CONTRACTS = {"Store": StoreContract, "Publisher": PublisherContract, "Source": SourceContract}


def adapters(kind: str) -> Iterator[str]:
    """The public classes of that kind. The files are only read, because an extra may be missing."""
    folder = Path(pillarbox.__file__).parent / f"{kind.lower()}s"
    assert folder.is_dir()
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        # The other files of an adapter's own folder are parts of the adapter.
        is_private = parts[0].startswith("_") or (len(parts) > 1 and parts[-1] != "__init__")
        if not is_private and parts[0] not in SHARED:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name[0] != "_" and is_adapter(node, kind):
                    yield node.name


def is_adapter(node: ast.ClassDef, kind: str) -> bool:
    methods = {each.name for each in node.body if isinstance(each, ast.AsyncFunctionDef)}
    return node.name.endswith(kind) or WORK[kind] in methods


def contracts(contract: type) -> Iterator[type]:
    """The subclasses that pytest collects below this folder."""
    for file in sorted(HERE.glob("test_*.py")):
        if file != Path(__file__):
            module = importlib.import_module(f"tests.conformance.{file.stem}")
            for name, found in inspect.getmembers(module, inspect.isclass):
                is_collected = name.startswith("Test") and found.__init__ is object.__init__
                if is_collected and issubclass(found, contract) and getattr(found, "__test__", True):
                    yield found


def names_of(test: type) -> set[str]:
    """The names that a contract class uses, its own ancestors included."""
    ours = [each for each in test.__mro__ if each.__module__.startswith("tests.")]
    trees = [ast.parse(inspect.cleandoc("\n" + inspect.getsource(each))) for each in ours]
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("kind", CONTRACTS)
def test_every_adapter_has_a_contract(kind: str) -> None:
    found = set(adapters(kind))
    assert found, f"no {kind} was found: the tree has changed, or this test looks in the wrong place"
    used = {name for test in contracts(CONTRACTS[kind]) for name in names_of(test)}
    assert not found - used, (
        f"without a class Test...({kind}Contract) in tests/conformance: {', '.join(sorted(found - used))}"
    )


def test_a_contract_has_tests() -> None:
    for contract in CONTRACTS.values():
        assert [name for name in dir(contract) if name.startswith("test_")]
