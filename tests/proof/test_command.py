"""`python -m proof`: it checks a folder and prints a card."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from proof.__main__ import main
from proof.history import History, Log, save
from tests.proof.world import World

ISSUE = [
    *("seed", "versions", "seconds", "events", "kills", "lost", "phantom", "corrupted", "reordered_keys"),
    *("fencing_violations", "unattributed_copies", "attributed_copies", "max_copies_per_kill"),
    *("recovery_p50", "recovery_p99", "verdict"),
]


def write(history: History, folder: Path) -> None:
    save(folder, "run", history.run)
    save(folder, "final", history.final)
    for name in ("witness", "writers", "deliveries", "effects", "requests", "replies", "changes", "faults", "samples"):
        log = Log(folder / f"{name}.jsonl")
        for line in getattr(history, name):
            log.write(line)
        log.close()
    for worker in {trace.worker for trace in history.traces}:
        log = Log(folder / f"trace-{worker}.jsonl")
        for trace in history.traces:
            if trace.worker == worker:
                log.write(trace)
        log.close()


def killed() -> History:
    world = World()
    world.take("w1")
    world.commit("a", "a", "b")
    world.turn("w1", dies="confirmed")
    return world.rest("w2")


def test_a_history_survives_its_files(tmp_path: Path) -> None:
    history = killed()
    write(history, tmp_path)

    assert asdict(History.read(tmp_path)) == asdict(history)


def test_the_card_of_a_run_that_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(killed(), tmp_path)

    assert main(["check", str(tmp_path), "--card", str(tmp_path / "build" / "card.json")]) == 0

    found = json.loads((tmp_path / "build" / "card.json").read_text())
    assert list(found)[: len(ISSUE)] == ISSUE
    assert (found["events"], found["kills"], found["attributed_copies"], found["max_copies_per_kill"]) == (3, 1, 3, 3)
    assert found["failure_bound_per_kill"] == 3.0
    printed = capsys.readouterr().out
    assert "attributed copies       3 (kill 3)" in printed
    assert printed.splitlines()[-1].split() == ["verdict", "pass"]


def test_the_card_of_a_run_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = killed()
    history.deliveries[:] = [line for line in history.deliveries if line.event_id != "e3"]
    write(history, tmp_path)

    assert main(["check", str(tmp_path), "--card", str(tmp_path / "card.json")]) == 1

    found = json.loads((tmp_path / "card.json").read_text())
    assert (found["verdict"], found["lost"]) == ("fail", 1)
    assert (
        "I1: committed, but neither delivered nor dead nor discarded by an operator (1)\n    e3"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_folder_without_a_history(tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)

    assert main(["check", str(tmp_path)]) == 2
    assert "holds no history" in capsys.readouterr().err


def test_a_file_with_a_damaged_line_is_no_history(tmp_path: Path) -> None:
    write(killed(), tmp_path)
    with (tmp_path / "changes.jsonl").open("a") as lines:
        lines.write("damaged\n")

    assert main(["check", str(tmp_path)]) == 2


def test_the_last_line_of_a_killed_process_may_be_cut_off(tmp_path: Path) -> None:
    write(killed(), tmp_path)
    with (tmp_path / "trace-w1.jsonl").open("a") as lines:
        lines.write('{"at":1')

    assert main(["check", str(tmp_path), "--card", str(tmp_path / "card.json")]) == 0


def test_a_run_says_its_seed_and_overwrites_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")

    assert main(["run", "--seed", "7", "--keep", str(tmp_path)]) == 2

    printed = capsys.readouterr()
    assert printed.out == "seed 7\n"
    assert "is not empty" in printed.err


def test_a_run_that_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = tmp_path / "history", tmp_path / "card.json"
    short = ["--store", "sqlite", "--broker", "handlers", "--seconds", "1", "--workers", "1", "--faults", "none"]

    assert main(["run", *short, "--seed", "3", "--keep", str(folder), "--card", str(file)]) == 0

    found = json.loads(file.read_text())
    assert (found["verdict"], found["seed"]) == ("pass", 3)
    assert found["commit"]
    assert main(["check", str(folder), "--card", str(file)]) == 0
    assert "seed 3, sqlite to handlers" in capsys.readouterr().out
