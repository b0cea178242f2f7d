"""The outputs of the demo: redrawn in place on a terminal, line by line elsewhere, or silent."""

import errno
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TextIO

from pillarbox.demo.crew import DemoFailed
from pillarbox.demo.frame import ASCII, BLOCKS, History, Marks, Piece, Scene, cut, frame, sentence

_LEAST_COLUMNS: Final = 32
_LEAST_LINES: Final = 10
_PLAIN_SECONDS: Final = 0.5
_HIDE_CURSOR: Final = "\x1b[?25l"
_SHOW_CURSOR: Final = "\x1b[?25h"
_CLEAR_REST_OF_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"
_INDENT: Final = " " * 9


class Screen(Protocol):
    """An output, as the story uses it."""

    def show(self, scene: Scene) -> None: ...

    def say(self, text: str, colour: str = "") -> None: ...

    def close(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""


class Silent:
    """Shows nothing."""

    def show(self, scene: Scene) -> None:
        pass

    def say(self, text: str, colour: str = "") -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    """Prints a line every half second, and every sentence."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._history = History()
        self._next = 0.0

    def show(self, scene: Scene) -> None:
        self._history.add(scene)
        if scene.seconds >= self._next:
            self._next = scene.seconds + _PLAIN_SECONDS
            self.say(sentence(scene, self._history))

    def say(self, text: str, colour: str = "") -> None:
        self._write(f"{text}\n")

    def close(self) -> None:
        pass

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            # A closed terminal is treated like a closed pipe.
            if error.errno in (errno.EPIPE, errno.EIO):
                raise BrokenPipeError(error.errno, error.strerror) from error
            raise DemoFailed(f"the output cannot be written: {error.strerror}") from error


class Live(Plain):
    """Redraws one block of lines in place, below the sentences. A terminal that is too small gets plain lines."""

    def __init__(self, out: TextIO, *, coloured: bool, marks: Marks) -> None:
        super().__init__(out)
        self._coloured, self._marks = coloured, marks
        self._block: list[list[Piece]] = []
        self._drawn = 0  # lines of the block on the terminal
        self._size = _size(out)
        self._hidden = False

    def show(self, scene: Scene) -> None:
        size = _size(self._out)
        if size != self._size:
            # A resized terminal has moved the old block: draw a new one below it, when the size no longer changes.
            self._size, self._drawn = size, 0
            return
        self._block = frame(scene, self._history, self._marks)
        if self._too_small():
            self.close()
            super().show(scene)
        else:
            self._history.add(scene)
            self._draw([])

    def say(self, text: str, colour: str = "") -> None:
        if self._too_small():
            super().say(text)
            return
        lines = textwrap.wrap(text, self._size.columns - 1, subsequent_indent=_INDENT, break_on_hyphens=False)
        self._draw([[Piece(line, colour)] for line in lines or [""]])

    def close(self) -> None:
        self._block, self._drawn = [], 0
        if self._hidden:
            self._hidden = False
            self._write(_SHOW_CURSOR)

    def _too_small(self) -> bool:
        return self._size.columns < _LEAST_COLUMNS or self._size.lines <= max(_LEAST_LINES, len(self._block))

    def _draw(self, said: Sequence[Sequence[Piece]]) -> None:
        # One column stays free: some terminals wrap when the last column is written.
        lines = [cut(line, self._size.columns - 1, self._coloured) for line in (*said, *self._block)]
        text = f"\x1b[{self._drawn}A\r" if self._drawn else ""
        text += "".join(f"{line}{_CLEAR_REST_OF_LINE}\n" for line in lines) + _CLEAR_BELOW
        if self._block and not self._hidden:
            self._hidden = True
            text = _HIDE_CURSOR + text
        self._drawn = len(self._block)
        self._write(text)


def choose(out: TextIO, environment: Mapping[str, str]) -> Screen:
    """The screen for this output: live on a capable terminal, else plain."""
    if not out.isatty() or environment.get("TERM", "dumb") in ("", "dumb"):
        return Plain(out)
    try:
        BLOCKS.bars.encode(out.encoding or "ascii")
        marks = BLOCKS
    except UnicodeError:
        marks = ASCII
    return Live(out, coloured=not environment.get("NO_COLOR"), marks=marks)


def _size(out: TextIO) -> os.terminal_size:
    try:
        columns, lines = os.get_terminal_size(out.fileno())
    except OSError:
        columns = lines = 0
    # Some terminals do not report a size.
    return os.terminal_size((columns or 80, lines or 24))
