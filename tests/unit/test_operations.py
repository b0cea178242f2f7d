"""Records and filters of operators: their exact form, which scripts rely on."""

import json
from datetime import UTC, datetime
from uuid import UUID

import pytest

from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError
from pillarbox.event import Mode, Status
from pillarbox.operations import (
    SeveralStreams,
    StreamRow,
    audit_record,
    event_record,
    filter_from,
    list_record,
    stream_record,
)
from pillarbox.store import Audit, Filter, Found, HoldMode, WorkerStatus

ID = UUID("0192f0c1-7b3a-7c11-8000-5f0e3a2b1c4d")
NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
UNPUBLISHED: list[Status] = [each for each in Status if each is not Status.PUBLISHED]
ANN = WorkerStatus("ann", True, 1.23456, 16, 13.76544)
SUMMARY = (
    *(
        "id",
        "seq",
        "stream",
        "consumer",
        "tenant",
        "topic",
        "type",
        "key",
        "status",
        "attempts",
        "created_at",
        "next_attempt_at",
    ),
    *("published_at", "replay_at", "last_error", "last_error_at", "payload_bytes", "unreadable"),
)
DETAILS = (
    *("aggregate_type", "aggregate_id", "routing_key", "content_type", "schema_id", "schema_version"),
    *("aggregate_version", "max_attempts", "occurred_at", "available_at", "processing_started_at", "lease_owner"),
    *("lease_until", "lease_token", "holds_key", "headers", "errors"),
)


def found(payload: bytes = b"{}") -> Found:
    event = make_event(id=ID, payload=payload, headers={"a": "b"}, status=Status.DEAD)._replace(created_at=NOON)
    return Found(event, len(payload), last_error_at=NOON, errors=[{"at": "then", "error": "refused"}], holds_key=True)


def test_an_event_in_a_list() -> None:
    record = list_record(found())
    assert tuple(record) == (*SUMMARY, "holds_key")
    assert (record["id"], record["status"], record["holds_key"]) == (str(ID), "dead", True)
    assert (record["created_at"], record["published_at"]) == ("2030-01-31T12:00:00.000Z", None)
    assert json.loads(json.dumps(record)) == record


def test_an_event_with_all_its_fields() -> None:
    letter = found()
    record = event_record(letter)
    assert tuple(record) == (*SUMMARY, *DETAILS), "the payload may contain secrets"
    assert (record["headers"], record["errors"]) == ({"a": "b"}, [{"at": "then", "error": "refused"}])
    assert event_record(letter, payload=True) == record | {"payload": "{}"}
    binary = event_record(found(b"\xff"), payload=True)
    assert (binary.get("payload"), binary["payload_base64"]) == (None, "/w==")
    assert json.loads(json.dumps(record)) == record


def test_a_stream() -> None:
    counts = dict.fromkeys(UNPUBLISHED, 0) | {Status.PENDING: 2}
    row = StreamRow("mail", Mode.QUEUE, "kafka a:9092", False, (), 2, 1.23456, counts, {Status.PENDING})
    record = stream_record(row)
    names = ("stream", "mode", "destination", "paused", "workers", "unserved", "waiting", "oldest_seconds")
    others = ("at_least", "held_keys", "worker_list", "reasons")
    assert tuple(record) == (*names, *(each.value for each in UNPUBLISHED), *others)
    values = ("mail", "queue", "kafka a:9092", False, 0, True, 2, 1.235, *counts.values(), ["pending"])
    assert tuple(record.values())[:-3] == values
    assert record["held_keys"] == {"retrying": 0, "blocked": 0, "parked": 0}
    served = stream_record(row._replace(workers=[ANN], mode=None))
    assert (served["unserved"], served["workers"], served["reasons"]) == (False, 1, [])
    seen = {"name": "ann", "live": True, "seen_seconds": 1.235, "shards": 16, "free_seconds": 13.765}
    seen |= {"circuit_error": None, "circuit_seconds": None, "version": None}
    assert served["worker_list"] == [seen]
    assert json.loads(json.dumps(served)) == served


def test_a_stream_says_why_its_events_wait() -> None:
    counts = dict.fromkeys(UNPUBLISHED, 0) | {Status.PENDING: 2}
    row = StreamRow("mail", Mode.ORDERED, "kafka a:9092", True, (), 2, 1.2, counts)
    assert row.reasons == [
        "it is paused; let it go on with `pillarbox streams resume mail`",
        "no relay serves it; start one with `pillarbox relay`, or see in the log of one that runs why it does not "
        "reach its destination",
    ]
    died = ANN._replace(name="bob", live=False, seen_seconds=12.3, shards=8, free_seconds=2.7)
    left = ANN._replace(name="cleo", live=False, seen_seconds=None, shards=0, free_seconds=5.0)
    held = {HoldMode.PARKED: 1, HoldMode.RETRYING: 1200}
    assert row._replace(paused=False, workers=[ANN, died, left], held_keys=held).reasons == [
        "worker bob was not seen for 12 s; its 8 shards come free in 3 s",
        "worker cleo has left; its events come free in 5 s",
        "keys are held behind an event that failed or died: 1,200 retrying, 1 parked",
    ]
    waits = ANN._replace(circuit_error="refused", circuit_seconds=61.7)
    assert row._replace(paused=False, workers=[waits]).reasons == [
        "worker ann waits for the destination since 62 s: refused",
    ]
    assert row._replace(waiting=0).reasons == []


def test_an_action() -> None:
    record = audit_record(Audit(NOON, "olga", "replay", "mail", ID))
    assert tuple(record) == ("at", "by", "action", "stream", "event_id", "consumer")
    assert tuple(record.values()) == ("2030-01-31T12:00:00.000Z", "olga", "replay", "mail", str(ID), None)
    assert audit_record(Audit(NOON, "olga", "pause", "mail", None))["event_id"] is None


def test_a_filter_from_texts() -> None:
    assert filter_from({}) == Filter()
    texts = {"stream": "mail", "status": "dead", "topic": "orders", "aggregate_id": "7", "limit": "5"}
    assert filter_from(texts) == Filter(stream="mail", status=Status.DEAD, topic="orders", aggregate_id="7")
    assert filter_from({"since": "2030-01-31T12:00:00Z"}).since == NOON
    with pytest.raises(ConfigError, match=r"^--status is 'daed'; did you mean 'dead'\?$"):
        filter_from({"status": "daed"}, "--")
    with pytest.raises(ConfigError, match=r"^until is 'soon'"):
        filter_from({"until": "soon"})


def test_an_id_of_several_streams_names_them() -> None:
    other = UUID(int=7)
    error = SeveralStreams({ID: ["orders", "mail"], other: ["a", "b"]})
    assert str(error) == f"{ID} is in the streams 'mail', 'orders'; {other} is in the streams 'a', 'b'; " + (
        "choose one with --stream"
    )
