"""Statements from ``.sql`` files: named texts, as the database runs them."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final, Literal, TypeAlias

# A driver's way to mark a parameter: by number, by place or by name.
Marks: TypeAlias = Literal["$", "%s", ":"]

_NAME: Final = re.compile(r"-- (\w+): ")
_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_]+)")


class SqlText:
    """A text with the driver's own marks, and the names of its parameters in the order of the marks."""

    __slots__ = ("names", "text")

    def __init__(self, text: str, marks: Marks, tables: Mapping[str, str]) -> None:
        text = " ".join(text.format_map(tables).split())
        found = _PARAMETER.findall(text)
        self.names: tuple[str, ...] = tuple(found if marks == "%s" else dict.fromkeys(found))
        if marks == "$":
            numbers = {name: f"${number}" for number, name in enumerate(self.names, 1)}
            text = _PARAMETER.sub(lambda match: numbers[match[1]], text)
        elif marks == "%s":
            text = _PARAMETER.sub("%s", text.replace("%", "%%"))
        self.text = text


@cache
def named_texts(package: str) -> Mapping[str, str]:
    """The texts of ``statements.sql``. Blank lines separate them; each begins with ``-- name: a sentence.``"""
    texts = {}
    for block in (files(package) / "statements.sql").read_text("utf-8").split("\n\n"):
        name = _NAME.match(block)
        text = "\n".join(line for line in block.split("\n") if not line.startswith("--")).strip()
        if text:
            assert name is not None, f"{package}: a statement without a name: {text[:60]}"
            texts[name[1]] = text
    return texts


class Statements(dict[str, SqlText]):
    """The statements of one outbox, by name.

    ``packages`` are the packages whose ``statements.sql`` is read; a later one can replace a statement."""

    def __init__(self, packages: Sequence[str], marks: Marks, tables: Mapping[str, str]) -> None:
        self._marks: Marks = marks
        self.tables = tables
        self.texts = {name: text for package in packages for name, text in named_texts(package).items()}
        super().__init__({name: self.make(text) for name, text in self.texts.items()})

    def make(self, text: str) -> SqlText:
        """Compile a statement that is in no file."""
        return SqlText(text, self._marks, self.tables)

    def extended(self, name: str, text: str) -> SqlText:
        """A statement with more text after it."""
        return self.make(f"{self.texts[name]} {text}")
