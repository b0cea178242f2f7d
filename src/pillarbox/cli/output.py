"""The output of commands: tables, records, JSON, and a progress line."""

import io
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

_GAP: Final = "  "
_LEAST: Final = 8  # characters that a column keeps when it shrinks
_STDERR: Final = 2
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"


class Column(NamedTuple):
    """A column of a table."""

    name: str
    title: str | None = None
    right: bool = False
    shrinks: bool = False


def prepare() -> None:
    """Make standard streams usable that are closed or cannot encode every character."""
    # C code writes to these file descriptors, so no file and no connection may get one of them.
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


def drop() -> None:
    """Discard all further output, including the buffer that is written when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_unicode() -> bool:
    return sys.stdout is None or (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=not _is_unicode(), default=str))


def duration(seconds: float | None) -> str:
    """Seconds, minutes, hours or days, for people to read."""
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def shown(value: Any) -> str:
    """The text of one cell. Control characters are escaped: keys and errors come from outside."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, int):
        return f"{value:,}"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(value))


def colour(text: str, *, bad: bool = False) -> str:
    """The text in red (``bad``) or yellow, on a terminal and unless ``NO_COLOR`` is set."""
    if not _is_terminal() or os.environ.get("NO_COLOR"):
        return text
    return f"{_RED if bad else _YELLOW}{text}{_PLAIN}"


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    attention: Mapping[tuple[int, str], bool] | None = None,
) -> None:
    """In full in a pipe; cut to the width of a terminal, or one field per line if that is too narrow.

    attention: the cells (number of row, name of column) to colour; True: as bad.
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
    """One field per line, without the empty ones."""
    there = {name: value for name, value in fields.items() if value not in (None, "", [], {})}
    width = max(map(len, there), default=0)
    for name, value in there.items():
        print(f"{name.ljust(width)}  {shown(value)}")


_BAR: Final = 30  # characters


class Progress:
    """A counting line on standard error, if that is a terminal."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._visible = sys.stderr.isatty()
        self._drawn = False

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show how much is done; with a total as a bar."""
        if self._visible:
            bar = "" if not total else f" of {total:,} [{'#' * (_BAR * done // total):.<{_BAR}}]"
            sys.stderr.write(f"\r\x1b[K{self._doing} {done:,}{bar}")
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
