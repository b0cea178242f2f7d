"""What the demo shows of a moment, at every width."""

import errno
import io
import os
from collections.abc import Callable

import pytest

from pillarbox.demo import screen
from pillarbox.demo.crew import DemoFailed
from pillarbox.demo.frame import ASCII, BLOCKS, History, Piece, Scene, WorkerSeen, cut, frame, sentence, spark
from pillarbox.demo.screen import Live, Plain, choose
from pillarbox.demo.shop import Snapshot
from tests.terminal import Terminal

Resize = Callable[[int, int], None]


def scene(seconds: float, delivered: int = 90, lag: float = 0.0) -> Scene:
    snapshot = Snapshot(
        {"pending": 10, "published": delivered}, lag, ("w1",) * 8 + ("w2",) * 8, {"worker-1": delivered}, 0
    )
    workers = (
        WorkerSeen("worker-1", "killed", delivered, frozenset(range(8))),
        WorkerSeen("worker-2", "serving", 0, frozenset(range(8, 16))),
    )
    return Scene(seconds, int(seconds * 100), 25, snapshot, workers)


@pytest.fixture
def resize(monkeypatch: pytest.MonkeyPatch) -> Resize:
    def to(columns: int, lines: int) -> None:
        monkeypatch.setattr(screen, "_size", lambda out: os.terminal_size((columns, lines)))

    to(80, 24)
    return to


def live(out: io.StringIO, *, coloured: bool = False) -> Live:
    return Live(out, coloured=coloured, marks=BLOCKS)


def seen(out: io.StringIO, columns: int = 80) -> Terminal:
    terminal = Terminal(columns)
    terminal.feed(out.getvalue())
    return terminal


def test_rates_are_those_of_the_last_second() -> None:
    history = History()
    assert history.rates() == (0.0, 0.0)
    for tenth in range(31):
        history.add(scene(tenth / 10, delivered=0 if tenth <= 20 else (tenth - 20) * 5))
    assert history.rates() == pytest.approx((100.0, 50.0))
    assert list(history.delivered_bars) == pytest.approx([0, 0, 0, 0, 50, 50])


def test_two_looks_at_the_same_instant_have_no_rate() -> None:
    history = History()
    history.add(scene(1.0))
    history.add(scene(1.0))
    assert history.rates() == (0.0, 0.0)


def test_bars() -> None:
    assert spark([0, 1, 2, 9, -1], 2, BLOCKS) == "▁▅██▁"
    assert spark([0, 2], 2, ASCII) == "_#"


def test_frame_shows_whose_shards_are_orphaned() -> None:
    lines = [cut(line, 80, False) for line in frame(scene(1), History(), BLOCKS)]
    assert "worker-1    killed   ▒▒▒▒▒▒▒▒········  8 shards      90 delivered" in lines
    assert "worker-2    serving  ········████████  8 shards       0 delivered" in lines
    assert any("pending 10" in line and "published 90" in line for line in lines)


def test_a_line_is_cut_between_colours() -> None:
    line = [Piece("abc", "red"), Piece("def", "green")]
    assert cut(line, 4, True) == "\x1b[31mabc\x1b[0m\x1b[32md\x1b[0m"
    assert cut(line, 4, False) == "abcd"
    assert cut(line, 0, True) == ""


def test_plain_line_tells_the_same() -> None:
    text = sentence(scene(1.5, lag=0.7), History())
    assert "committed 150" in text
    assert "lag 0.7 s  shards: worker-1 8 (killed), worker-2 8" in text


def test_plain_shows_two_lines_a_second_at_most() -> None:
    out = io.StringIO()
    plain = Plain(out)
    for tenth in range(20):
        plain.show(scene(tenth / 10))
    assert len(out.getvalue().splitlines()) == 4
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("columns", [32, 40, 80, 200])
def test_live_redraws_in_place_and_wraps_nothing(columns: int, resize: Resize) -> None:
    resize(columns, 24)
    out = io.StringIO()
    screen = live(out, coloured=True)
    screen.say("It begins.")
    screen.show(scene(1))
    assert not seen(out).cursor_shown
    screen.say("A sentence that is longer than a narrow terminal is wide, and says so.", "red")
    screen.show(scene(2, lag=1.5))
    screen.close()
    screen.close()
    terminal = seen(out, columns - 1)
    assert terminal.cursor_shown
    assert terminal.wrapped == 0
    assert terminal.text.startswith("It begins.\nA sentence")
    assert terminal.text.count("committed") == 1
    assert "committed      200" in terminal.text


def test_what_is_said_after_the_end_stands_below_the_view(resize: Resize) -> None:
    out = io.StringIO()
    screen = live(out)
    screen.show(scene(1))
    screen.close()
    screen.say("The promise held.")
    terminal = seen(out)
    assert terminal.lines[-2:] == ["The promise held.", ""]
    assert terminal.text.count("committed") == 1
    assert not terminal.coloured


def test_after_a_resize_a_new_view_begins_below(resize: Resize) -> None:
    out = io.StringIO()
    screen = live(out)
    screen.show(scene(1))
    resize(60, 24)
    screen.show(scene(2))
    screen.show(scene(3))
    terminal = seen(out)
    assert terminal.text.count("committed") == 2
    assert "committed      300" in terminal.text


@pytest.mark.parametrize(("columns", "lines"), [(31, 24), (80, 7)])
def test_a_terminal_too_small_gets_plain_lines(columns: int, lines: int, resize: Resize) -> None:
    out = io.StringIO()
    screen = live(out)
    screen.show(scene(1))
    resize(columns, lines)
    screen.show(scene(2))
    screen.show(scene(3))
    screen.say("Told.")
    terminal = seen(out, 200)
    assert terminal.cursor_shown
    assert terminal.lines[-3].startswith("  3.0 s  committed 300")
    assert terminal.lines[-2] == "Told."


class FakeTerminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("environment", [{}, {"TERM": ""}, {"TERM": "dumb"}])
def test_a_terminal_that_can_do_nothing_gets_plain_lines(environment: dict[str, str]) -> None:
    assert not isinstance(choose(FakeTerminal(io.BytesIO(), "utf-8"), environment), Live)
    assert not isinstance(choose(io.StringIO(), {"TERM": "xterm"}), Live)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("no_color", ["", "1"])
def test_encoding_and_colour_are_those_of_the_terminal(encoding: str, no_color: str) -> None:
    written = io.BytesIO()
    screen = choose(FakeTerminal(written, encoding), {"TERM": "xterm", "NO_COLOR": no_color})
    screen.show(scene(1))
    screen.show(scene(2))
    terminal = Terminal(79)
    terminal.feed(written.getvalue().decode())
    assert terminal.coloured is not bool(no_color)
    assert ("████████" if encoding == "utf-8" else "########") in terminal.text


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.EPIPE, BrokenPipeError), (errno.EIO, BrokenPipeError), (errno.ENOSPC, DemoFailed)],
)
def test_an_output_that_fails(number: int, expected: type[Exception]) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "gone")

    with pytest.raises(expected, match="gone"):
        Plain(Broken()).say("x")
