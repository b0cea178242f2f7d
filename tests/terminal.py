"""A terminal as small as the demo needs it: what a user would see of the bytes."""

import re

_TOKEN = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)|(\x1b)")


class Terminal:
    """Lines that scroll; a line that would be wrapped is counted, because none should be."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.cursor_shown = True
        self.wrapped = 0
        self.coloured = False
        self._x = self._y = 0

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)

    def feed(self, written: str) -> None:
        for match in _TOKEN.finditer(written):
            number, command, back, down, text, broken = match.groups()
            assert not broken, "an escape sequence was cut"
            if command:
                self._command(number, command)
            elif back:
                self._x = 0
            elif down:
                self._down()
            else:
                self._put(text)

    def _command(self, number: str, command: str) -> None:
        match command:
            case "A":
                self._y -= int(number)
                assert self._y >= 0, "drawn above what was written"
            case "K":
                self.lines[self._y] = self.lines[self._y][: self._x]
            case "J":
                self.lines[self._y] = self.lines[self._y][: self._x]
                del self.lines[self._y + 1 :]
            case "m":
                self.coloured = True
            case "h" | "l":
                assert number == "?25"
                self.cursor_shown = command == "h"
            case _:
                raise AssertionError(f"unknown sequence {number}{command}")

    def _down(self) -> None:
        # As the driver of a terminal does: a new line begins at the left.
        self._x = 0
        self._y += 1
        if self._y == len(self.lines):
            self.lines.append("")

    def _put(self, text: str) -> None:
        line = self.lines[self._y].ljust(self._x)
        self.lines[self._y] = line[: self._x] + text + line[self._x + len(text) :]
        self._x += len(text)
        self.wrapped += self._x > self.columns
