"""The benchmark around its measurements: the choice of rows, bars, tables, the file, plots and the page."""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import compare, drains, everyday, idle, page, pairs, plots, report, sessions
from benchmarks.bed import Bed
from benchmarks.child import ChildFailedError
from benchmarks.costs import STORES, kind_of, mongo_statements, mysql_statements
from benchmarks.everyday import RATES, Spent, Written
from benchmarks.everyday_writer import body, instants
from benchmarks.failures import PeerFailedError, peer_side
from benchmarks.load_events import PAYLOAD_BYTES
from benchmarks.pairs import Work
from benchmarks.report import Bar, Row, percentiles, table
from benchmarks.rounds import in_turn
from benchmarks.rows import DEFAULT_SECONDS, NO_BAR, ROWS, Entry, chosen
from benchmarks.scale import QUICK, Scale
from servers import MissingError

DOCS = Path(__file__).parents[2] / "docs"


class TestChoice:
    def test_by_default_there_is_time_for_the_rows_with_bars(self) -> None:
        wanted = {
            "postgres-kafka",
            "mongo-kafka",
            "postgres-to-consumer",
            "peer-debezium",
            "peer-txoutbox",
            "peer-loop",
        }
        names = chosen(None)
        assert wanted <= set(names)
        # Starting the servers takes time too.
        assert sum(ROWS[name].seconds for name in names if ROWS[name].bar) < DEFAULT_SECONDS - 30
        assert sorted(names, key=lambda name: ROWS[name].bar is NO_BAR) == names

    def test_by_default_nothing_slow_is_measured(self) -> None:
        slow = {"postgres-backlog-5m", "mariadb-kafka", "peer-debezium-cold", "peer-omni-box", "postgres-grid"}
        assert not slow & set(chosen(None))

    def test_all_is_every_row(self) -> None:
        assert chosen(None, everything=True) == list(ROWS)

    def test_one_name_stands_for_all_peers(self) -> None:
        wanted = {"debezium", "debezium-cold", "txoutbox", "faststream-outbox", "omni-box", "loop"}
        names = set(chosen(["peers"]))
        assert {f"peer-{name}" for name in wanted} <= names
        assert names <= set(ROWS)

    def test_every_store_has_its_everyday_rates_and_its_idle_relay(self) -> None:
        assert chosen(["everyday"]) == [f"everyday-{store}-{rate}" for store in STORES for rate in RATES]
        assert chosen(["idle"]) == [f"{store}-idle" for store in STORES]
        assert set(chosen(["everyday", "idle"])) == set(compare.DRIVEN) <= set(ROWS)

    def test_a_row_is_measured_once(self) -> None:
        assert chosen(["peer-loop", "add", "peer-loop"]) == ["peer-loop", "add"]

    @pytest.mark.parametrize(
        ("given", "scale"),
        [
            ({}, Scale()),
            ({"all": True}, Scale()),
            ({"only": ["add"]}, Scale()),
            ({"quick": True}, QUICK),
            ({"rounds": 5}, Scale().with_rounds(5)),
        ],
    )
    def test_a_row_by_name_is_that_of_a_default_run(self, given: dict[str, Any], scale: Scale) -> None:
        arguments = argparse.Namespace(**{"all": False, "only": None, "quick": False, "rounds": None, **given})
        assert program.scale_of(arguments) == scale

    def test_promised_rows_have_more_rounds_and_rows_without_a_bar_fewer(self) -> None:
        assert Scale().for_row(has_bar=True, promised=True).rounds == 5
        assert Scale().for_row(has_bar=True, promised=False).rounds == 3
        assert Scale().for_row(has_bar=False, promised=False).rounds == 2

    def test_every_second_round_swaps_the_order_of_the_sides(self) -> None:
        order: list[str] = []

        def side(name: str) -> Callable[[], int]:
            def measure() -> int:
                order.append(name)
                return len(order)

            return measure

        assert in_turn(3, side("ours"), side("floor")) == [[1, 4, 5], [2, 3, 6]]
        assert order == ["ours", "floor", "floor", "ours", "ours", "floor"]


class TestPairs:
    @pytest.mark.asyncio
    async def test_sides_take_turns_and_every_second_turn_swaps_them(self) -> None:
        order: list[str] = []
        values = iter(range(10))

        def side(name: str) -> Work:
            async def work(value: int) -> None:
                order.append(f"{name}{value}")

            return work

        found = await pairs.medians(3, lambda: next(values), side("ours"), side("floor"))
        assert order == ["ours0", "floor1", "floor2", "ours3", "ours4", "floor5"]
        assert all(each > 0 for each in found)

    def test_a_shorter_time_is_a_higher_speed(self) -> None:
        assert pairs.speeds([[100.0, 200.0], [1000.0, 500.0]], 10) == ([100_000, 10_000], [50_000, 20_000])

    def test_all_hooks_on_sessions_are_taken_off_and_set_again(self) -> None:
        before = sessions.hooks()
        assert {"before_flush", "before_commit", "after_transaction_end"} <= {hook.name for hook in before}
        with sessions.without(before):
            assert sessions.hooks() == []
        assert sessions.hooks() == before


class TestBars:
    @pytest.mark.parametrize(
        ("name", "bar"),
        [
            ("postgres-kafka", ">= 0.9"),
            ("mongo-kafka", ">= 0.9"),
            ("postgres-backlog-5m", ">= 0.9"),
            ("postgres-to-consumer", "< +5"),
            ("peer-debezium", ">= 1.2"),
            ("peer-txoutbox", ">= 3.5"),
            ("peer-txoutbox-latency", "<= 1"),
            ("add", "<= 1.25"),
            ("add-django", "<= 1.11"),
            ("inbox-record", ">= 0.95"),
            ("inbox-batch", ">= 0.9"),
            ("inbox-newer", ">= 0.9"),
            ("idempotent-run", ">= 0.8"),
            ("idempotent-endpoint", ">= 0.8"),
            ("session-without-aggregates", ">= 0.98"),
        ],
    )
    def test_the_bar_of_a_row(self, name: str, bar: str) -> None:
        assert str(ROWS[name].bar) == bar

    def test_the_table_says_when_a_row_has_no_bar(self) -> None:
        assert Row("free", "events/s", [1.0], [2.0], bar=NO_BAR).as_dict()["bar"] == "none"
        assert "missed" not in table([Row("free", "events/s", [1.0], [2.0], bar=NO_BAR)])

    def test_a_row_that_deletes_has_a_bar_of_its_own(self) -> None:
        deleted = Row("peer-debezium-deleted", "events/s", [1.0], [1.0])
        assert str(ROWS["peer-debezium"].bar_of(deleted)) == ">= 1.5"
        assert str(ROWS["peer-mongo"].bar_of(deleted)) == ">= 1"

    def test_a_row_can_bring_its_bar(self) -> None:
        row = Row("peer-mongo-connector-200", "ms", [1.0], [1.0], bar=Bar(4.0, at_most=True))
        assert str(ROWS["peer-mongo-200"].bar_of(row)) == "<= 4"

    def test_the_late_events_of_a_row_have_a_bar_of_their_own(self) -> None:
        entry = ROWS["postgres-to-consumer"]
        assert entry.bar_of(Row("postgres-to-consumer-p99", "ms", [1.0], [1.0])) is NO_BAR

    @pytest.mark.parametrize(
        ("bar", "ours", "met"),
        [
            (Bar(0.9), 95.0, True),
            (Bar(0.9), 85.0, False),
            (Bar(1.1, at_most=True), 120.0, False),
            (Bar(5.0, difference=True), 104.9, True),
            (Bar(5.0, difference=True), 105.0, False),
        ],
    )
    def test_met_or_missed(self, bar: Bar, ours: float, met: bool) -> None:
        assert Row("a", "ms", [ours], [100.0], bar=bar).as_dict()["met"] is met

    @pytest.mark.parametrize("name", ROWS)
    def test_every_row_is_on_a_page(self, name: str) -> None:
        text = (DOCS / "benchmarks.md").read_text() + (DOCS / "peers.md").read_text()
        # A list of similar rows gives only the ends of their names after the first.
        assert f"`{name}" in text or f"`-{name.rpartition('-')[2]}`" in text


class TestTables:
    def test_floors_and_peers_are_tables_of_their_own(self) -> None:
        rows = [
            Row("drain", "events/s", [90.0], [100.0], bar=Bar(0.85)),
            Row("peer-loop", "events/s", [90.0], [30.0], against="peer", bar=Bar(1.0)),
        ]
        floor, peer = table(rows).split("\n\n")
        assert floor.split("\n")[0].split()[2:4] == ["floor", "ours"]
        assert peer.split("\n")[0].split()[2:4] == ["peer", "ours"]
        assert peer.split("\n")[1].split()[:5] == ["peer-loop", "events/s", "30.0", "90.0", "3.000"]

    def test_a_ratio_is_shown_with_its_spread(self) -> None:
        found = Row("drain", "events/s", [90.0, 95.0, 70.0], [100.0, 100.0, 100.0]).as_dict()
        assert [found[name] for name in ("ratio", "low", "high")] == [0.9, 0.7, 0.95]

    def test_percentiles_are_a_table_of_their_own(self) -> None:
        row = Row("soon", "ms", [1.0], [1.0], percentiles("ours", [float(n) for n in range(1, 1000)]))
        last = table([row]).split("\n\n")[-1].split("\n")[-1]
        assert last.split() == ["soon", "ours", "500.00", "950.00", "990.00"]


class TestEveryday:
    def test_transactions_come_at_random_instants_that_are_the_same_in_each_phase(self) -> None:
        found = instants(20, 10, seed=1)
        assert len(found) == 200
        assert found == sorted(found) == instants(20, 10, seed=1) != instants(20, 10, seed=2)
        assert found[0] >= 0
        assert found[-1] <= 10
        gaps = [later - earlier for earlier, later in pairwise(found)]
        # Gaps of a Poisson process spread as widely as they are long; even gaps would not spread.
        assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.3)

    @pytest.mark.parametrize("number", [0, 9_999, 1_000_000])
    def test_payloads_have_the_size_of_all_others(self, number: int) -> None:
        assert len(json.dumps(body(number))) == PAYLOAD_BYTES

    def test_late_commits_lower_the_rate_and_early_ones_do_not_raise_it(self) -> None:
        assert Written(2.0, 100.0, {1: 100.5, 2: 101.0}).per_second == 1.0
        assert Written(2.0, 100.0, {1: 100.5, 2: 104.0}).per_second == 0.5

    def test_the_cost_is_what_the_server_spends_beyond_the_writers(self) -> None:
        served, alone = Written(1.0, 0.0, {1: 0.1, 2: 0.2}), Written(1.0, 5.0, {3: 5.1, 4: 9.0})
        cost = Spent(0.003, 0.010, Counter(insert=2, select=8, hello=1))
        found = everyday.figures(served, {1: 0.11, 2: 0.15}, cost, alone, Spent(0.0, 0.004, Counter(insert=2, hello=3)))
        assert found.latencies == pytest.approx([10.0, 0.0])
        assert (found.per_second, found.alone_per_second) == (2.0, 0.5)
        assert found.relay_cpu_us == pytest.approx(1500)
        assert found.server_cpu_us == pytest.approx(3000)
        assert found.statements == {"select": 4.0, "hello": -1.0}
        assert found.statements_per_event == 3.0

    def test_without_a_server_there_are_only_the_figures_of_relay_and_writers(self) -> None:
        written, nothing = Written(1.0, 0.0, {1: 0.1, 2: 0.2}), Spent(0.001, None, None)
        found = everyday.figures(written, {1: 0.2, 2: 0.3}, nothing, written, nothing)
        assert found.as_dict().keys() == {"p50 ms", "p95 ms", "p99 ms", "writers' events/s", "relay CPU us/event"}

    def test_the_costs_of_an_event_are_a_table_of_their_own(self) -> None:
        some = everyday.Figures([1.0, 2.0], 20.0, 20.0, 500.0, 900.0, {"SELECT": 2.0, "UPDATE": 1.0})
        none = everyday.Figures([1.0, 2.0], 20.0, 20.0, 500.0, None, None)
        rows = [everyday.row("everyday-mysql-20", 20, [some]), everyday.row("everyday-sqlite-20", 20, [none])]
        costs = table(rows).split("\n\n")[-1].split("\n")
        assert costs[1].split() == ["everyday-mysql-20", "us", "500.0", "900.0", "3.0", "300.0"]
        assert costs[2].split() == ["everyday-sqlite-20", "us", "500.0", "-", "-", "-"]
        assert rows[0].as_dict()["statements"] == {"SELECT": 2.0, "UPDATE": 1.0}

    def test_an_idle_relay_costs_what_the_server_does_not_spend_without_it(self) -> None:
        found = idle.figures(Spent(0.02, 0.06, Counter(select=9)), Spent(0.0, 0.05, Counter(select=1)), 4.0)
        assert found.as_dict() == pytest.approx({"relay CPU %": 0.5, "server CPU %": 0.25, "statements/s": 2.0})

    def test_statements_are_named_as_the_server_names_them(self) -> None:
        assert [kind_of(query) for query in ("BEGIN;", "select 1", "\n WITH a AS (SELECT 1)")] == [
            "BEGIN",
            "SELECT",
            "WITH",
        ]
        status = {"Com_select": 3, "Com_stmt_execute": 3, "Uptime": 7}
        assert mysql_statements(status) == {"select": 3}
        assert mongo_statements({"find": {"total": 2, "failed": 1}, "<UNKNOWN>": 5}) == {"find": 2}


def _rows(*names: str, **extra: Any) -> list[Row]:
    return [Row(name, "events/s", [10.0, 12.0], [11.0, 11.0], {**extra}) for name in names]


class TestRun:
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(program, "FILE", tmp_path / "bench.json")
        monkeypatch.setattr(drains, "warm_up", lambda _bed, _scale: None)
        return program.FILE

    def _measure(self, monkeypatch: pytest.MonkeyPatch, limit: float | None = None, **entries: Any) -> program.Run:
        found = {name: Entry(measure, Bar(1.0), 10) for name, measure in entries.items()}
        monkeypatch.setattr(program, "ROWS", found)
        run = program.Run(Scale(), limit, time.monotonic())
        run.measure(Bed.__new__(Bed), list(found))
        return run

    @pytest.mark.parametrize("error", [MissingError("no Java"), PeerFailedError("the driver crashed")])
    def test_a_peer_that_fails_costs_its_row_only(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def crash(_bed: Bed, _scale: Scale) -> list[Row]:
            raise error

        run = self._measure(monkeypatch, peer=crash, good=lambda _bed, _scale: _rows("good"))
        assert [row.name for row in run.rows] == ["good"]
        assert not run.failed
        assert capsys.readouterr().out == f"left out  peer: {error}\n"

    def test_a_row_of_ours_that_fails_fails_the_run_and_not_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def crash(_bed: Bed, _scale: Scale) -> list[Row]:
            raise RuntimeError("lost an event")

        run = self._measure(monkeypatch, bad=crash, good=lambda _bed, _scale: _rows("good"))
        assert run.failed == ["bad"]
        assert [row.name for row in run.rows] == ["good"]

    def test_an_interrupted_run_leaves_its_figures_in_the_file(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(_bed: Bed, _scale: Scale) -> list[Row]:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self._measure(monkeypatch, good=lambda _bed, _scale: _rows("good"), slow=interrupted)
        assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["good"]

    def test_a_row_that_would_not_end_in_time_is_left_out(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = self._measure(monkeypatch, limit=5, late=lambda _bed, _scale: _rows("late"))
        assert not run.rows
        assert capsys.readouterr().out.startswith("left out  late: no time")

    def test_only_the_peers_side_is_blamed_on_the_peer(self) -> None:
        with pytest.raises(PeerFailedError, match="exit code 1"), peer_side():
            raise ChildFailedError("ended with exit code 1\nand more lines")


@pytest.fixture
def measured(tmp_path: Path) -> dict[str, Any]:
    """A file of a run, with rows for every plot."""
    times = {**percentiles("ours", [1.0, 2.0, 9.0]), **percentiles("floor", [1.0, 1.5, 2.0])}
    rows = [
        *_rows("postgres-kafka"),
        *_rows("postgres-latency-50", per_second=50, **times),
        *_rows("postgres-latency-1000", per_second=1000, **times),
        *_rows("postgres-backlog-1m", waiting=1_000_000, few_waiting=20_000),
        *_rows("mongo-backlog-1m", waiting=1_000_000, few_waiting=20_000),
        *_rows("postgres-workers-2", workers=2),
        *_rows("postgres-workers-4", workers=4),
        *_rows("postgres-grid-500x1", batch=500, slots=1),
        *_rows("postgres-grid-2000x1", batch=2000, slots=1),
        *_rows("postgres-grid-2000x4", batch=2000, slots=4),
    ]
    report.write(tmp_path / "bench.json", {"machine": "a laptop", "command": "python -m benchmarks --all"}, rows)
    return plots.read(tmp_path / "bench.json")


class TestPlots:
    def test_there_is_one_plot_for_each_question(self, measured: dict[str, Any], tmp_path: Path) -> None:
        drawn = plots.draw(measured, tmp_path)
        assert [file.name for file in drawn] == ["throughput.svg", "latency.svg", "backlog.svg", "workers.svg"]
        assert all("<svg" in file.read_text() for file in drawn)
        assert "relay processes" in (tmp_path / "workers.svg").read_text()

    def test_the_same_run_draws_the_same_bytes(self, measured: dict[str, Any], tmp_path: Path) -> None:
        first = [file.read_bytes() for file in plots.draw(measured, tmp_path / "first")]
        assert first == [file.read_bytes() for file in plots.draw(measured, tmp_path / "second")]
        assert b"date" not in b"".join(first)

    def test_missing_rows_are_not_drawn(self, measured: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "latency.svg").write_text("of another run")
        measured["rows"] = measured["rows"][:1]
        assert plots.draw(measured, tmp_path) == []
        assert not list(tmp_path.glob("*.svg"))


class TestPage:
    def test_the_figures_of_a_run_come_between_the_marks(self, measured: dict[str, Any], tmp_path: Path) -> None:
        file = tmp_path / "benchmarks.md"
        file.write_text(f"# Benchmarks\n\n{page.BEGIN}\nof another run\n{page.END}\nthe end\n")
        page.fill(file, measured, ["latency"])
        text = file.read_text()
        assert "of another run" not in text
        assert "machine   a laptop" in text
        assert "| postgres-kafka | events/s | 11.0 | 11.0 | 1.000 | 0.909 | 1.091 | none |  |" in text
        assert text.count("plots/") == 1
        assert text.endswith(f"{page.END}\nthe end\n")
        page.fill(file, measured, ["latency"])
        assert file.read_text() == text

    def test_a_page_without_marks_is_left_alone(self, measured: dict[str, Any], tmp_path: Path) -> None:
        file = tmp_path / "benchmarks.md"
        file.write_text("# Benchmarks\n")
        with pytest.raises(SystemExit, match="no block for figures"):
            page.fill(file, measured, [])

    def test_our_page_has_the_marks(self) -> None:
        text = (DOCS / "benchmarks.md").read_text()
        assert text.count(page.BEGIN) == text.count(page.END) == 1
