"""What people and scripts read: tables, records, JSON, and a line that shows progress."""

import io
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

_GAP: Final = "  "
_LEAST: Final = 8  # to how many characters a column may shrink
_STDERR: Final = 2
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"


class Column(NamedTuple):
    """A column of a table: the name of its field, its title, and how it behaves."""

    name: str
    title: str | None = None
    right: bool = False
    shrinks: bool = False


def prepare() -> None:
    """Make standard streams usable that are closed, or cannot write every character."""
    # C code writes to these numbers, so that no file and no connection may get one.
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(number)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0)
    if sys.stderr is None:
        sys.stderr = os.fdopen(_STDERR, "w")
    if isinstance(sys.stdout, io.TextIOWrapper) and not _is_unicode():
        sys.stdout.reconfigure(errors="backslashreplace")


def flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _is_unicode() -> bool:
    return sys.stdout is None or (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=not _is_unicode(), default=str))


def instant(value: datetime | None) -> str | None:
    """As JSON has it: ISO 8601 in UTC."""
    return None if value is None else value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def duration(seconds: float | None) -> str:
    """For people: two digits are enough."""
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def shown(value: Any) -> str:
    """One cell. What a terminal would obey is escaped: keys and errors come from outside."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, int):
        return f"{value:,}"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(value))


def colour(text: str, *, bad: bool = False) -> str:
    """Marks what needs attention, on a terminal whose user has not declined colours."""
    if not _is_terminal() or os.environ.get("NO_COLOR"):
        return text
    return f"{_RED if bad else _YELLOW}{text}{_PLAIN}"


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    attention: Mapping[tuple[int, str], bool] | None = None,
) -> None:
    """As wide as it needs to be in a pipe; on a terminal what does not fit is cut, or told line by line.

    attention: cells (number of row, name of column) to be coloured; True: as bad.
    """
    cells = [[shown(row.get(column.name)) for column in columns] for row in rows]
    titles = [column.title or column.name for column in columns]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    limit = _width()
    if limit is not None:
        _shrink(columns, widths, limit)
        if sum(widths) + len(_GAP) * (len(widths) - 1) > limit:
            _print_records(titles, cells)
            return
    for number, line in enumerate([titles, *cells], -1):
        padded = []
        for column, width, text in zip(columns, widths, line, strict=True):
            text = text if len(text) <= width else f"{text[: width - 1]}…"
            place = text.rjust(width) if column.right else text.ljust(width)
            marked = (attention or {}).get((number, column.name))
            padded.append(place if marked is None else colour(place, bad=marked))
        print(_GAP.join(padded).rstrip())


def _width() -> int | None:
    if _is_terminal() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def _shrink(columns: Sequence[Column], widths: list[int], limit: int) -> None:
    while sum(widths) + len(_GAP) * (len(widths) - 1) > limit:
        able = [place for place, column in enumerate(columns) if column.shrinks and widths[place] > _LEAST]
        if not able:
            return
        widths[max(able, key=lambda place: widths[place])] -= 1


def _print_records(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    for number, line in enumerate(cells):
        if number:
            print()
        for title, text in zip(titles, line, strict=True):
            print(f"{title}: {text}")


def print_record(fields: Mapping[str, Any]) -> None:
    """One thing, a field per line; what it does not have is left out."""
    there = {name: value for name, value in fields.items() if value not in (None, "", [], {})}
    width = max(map(len, there), default=0)
    for name, value in there.items():
        print(f"{name.ljust(width)}  {shown(value)}")


class Progress:
    """A line that counts, on standard error and only if that is a terminal."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._visible = sys.stderr.isatty()
        self._drawn = False

    def __call__(self, done: int) -> None:
        if self._visible:
            sys.stderr.write(f"\r\x1b[K{self._doing} {done:,}")
            sys.stderr.flush()
            self._drawn = True

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def count(number: int, one: str, many: str | None = None) -> str:
    """``1 event``, ``2 events``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
