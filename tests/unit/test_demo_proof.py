"""The proof of the demo can fail: each way to break the promise is found."""

import io
from collections.abc import Sequence

import pytest

from pillarbox.cli import main
from pillarbox.demo.proof import Delivery, Proof, prove
from pillarbox.demo.screen import Plain
from pillarbox.demo.shop import Window
from pillarbox.demo.story import conclude

HISTORY = [Delivery(f"{key}{number}", key, number) for number in (1, 2, 3) for key in "ab"]
PLACED = {delivery.event_id for delivery in HISTORY}


def proof_of(deliveries: Sequence[Delivery], placed: set[str] = PLACED) -> Proof:
    return prove(placed, 1, deliveries, slots=1, batch=2)


def said(proof: Proof) -> tuple[int, str]:
    out = io.StringIO()
    return conclude(proof, Plain(out)), out.getvalue()


def test_a_history_without_fault_holds() -> None:
    proof = proof_of(HISTORY)
    assert proof == Proof(6, 1, 6, 0, 0, 2, 0, 0, slots=1, batch=2)
    code, text = said(proof)
    assert code == 0
    assert text.endswith("The promise held.\n")
    assert "BROKEN" not in text


def test_copies_of_what_was_in_flight_hold() -> None:
    proof = proof_of([*HISTORY, HISTORY[0], HISTORY[0]])
    assert (proof.copies, proof.copies_limit, proof.holds) == (2, 2, True)


@pytest.mark.parametrize(
    ("deliveries", "placed", "fault"),
    [
        pytest.param(HISTORY[:-1], PLACED, "lost 1", id="lost"),
        pytest.param([], PLACED, "lost 6", id="all lost"),
        pytest.param([*HISTORY, Delivery("c1", "c", 1)], PLACED, "delivered without a commit 1", id="phantom"),
        pytest.param([HISTORY[2], HISTORY[0], *HISTORY[3:], HISTORY[1]], PLACED, "out of order 2", id="reordered"),
        pytest.param([*HISTORY, *HISTORY[:3]], PLACED, "at most 2", id="too many copies"),
        pytest.param([], set[str](), "", id="nothing was committed"),
    ],
)
def test_a_broken_promise_is_found(deliveries: list[Delivery], placed: set[str], fault: str) -> None:
    code, text = said(proof_of(deliveries, placed))
    assert code == 1
    assert any("BROKEN" in line and fault in line for line in text.splitlines()[:-1]), text
    assert text.endswith("THE PROMISE WAS BROKEN: please report this run.\n")


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_run_with_a_delivery_missing_exits_with_1(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Window.deliveries
    monkeypatch.setattr(Window, "deliveries", lambda window: whole(window)[:-1])
    assert main(["demo", "--duration", "100ms", *flags]) == 1
    assert ('"lost": 1' if flags else "lost 1") in capsys.readouterr().out
