"""The page about logs is complete: every stable ``action`` of a log line stands on it, and no other."""

import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "pillarbox"
PAGE = Path(__file__).parents[2] / "docs" / "logs.md"
# The ways in which a line gets its action.
_WAYS = (
    r'"action": "([a-z_]+)"',
    r'\bfields\(\s*"([a-z_]+)"(?: if \w+ else "([a-z_]+)")?',
    r'\b_write\(\s*[\w.]+,\s*"([a-z_]+)"',
    r'\btrace\(\s*"([a-z_]+)"',
    r'\b_drop\([^,()]+, "([a-z_]+)"',
)
_SERVICE = re.compile(r'^    name(?:: [\w\[\]]+)? = "([a-z_]+)"$', re.MULTILINE)
_ROW = re.compile(r"^\| `([a-z_]+)` \| (debug|info|warning|error)(?:, (?:warning|error))? \| .+ \|$", re.MULTILINE)


def written() -> Iterator[str]:
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        for way in _WAYS:
            for found in re.finditer(way, text):
                yield from filter(None, found.groups())
        if re.search(r"\(Service\)", text):
            yield from (f"{name}_failed" for name in _SERVICE.findall(text))


def test_every_action_is_on_the_page() -> None:
    explained = _ROW.findall(PAGE.read_text())
    names = [name for name, *_ in explained]
    assert set(written()) - set(names) == set(), "docs/logs.md lacks these actions"
    assert set(names) - set(written()) == set(), "docs/logs.md has actions that no line has"
    assert names == sorted(set(names))


def test_every_line_with_fields_has_an_action() -> None:
    known = re.compile(r'extra=(?:\{\s*"action": "|[\w.]*\bfields\b|extra\b|self\._failed\b)')
    for file in SOURCE.rglob("*.py"):
        for found in re.finditer(r"\bextra=[^=]", text := file.read_text()):
            assert known.match(text, found.start()), f"{file.name}: {text[found.start() : found.start() + 60]}"
