"""The records of events, streams and the audit, ready for JSON. Pure."""

import base64
from datetime import UTC, datetime
from typing import Any

from pillarbox.event import Event
from pillarbox.operations.consumers import ConsumerRow
from pillarbox.operations.streams import StreamRow
from pillarbox.store import Audit, ConsumerStatus, Found, HoldMode, WorkerStatus


def list_record(found: Found) -> dict[str, Any]:
    """An event in a list."""
    return _summary(found) | {"holds_key": found.holds_key}


def event_record(found: Found, *, payload: bool = False) -> dict[str, Any]:
    """An event with all its fields; with its payload only on request, because that may contain secrets."""
    event = found.event
    return {
        **_summary(found),
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "routing_key": event.routing_key,
        "content_type": event.content_type,
        "schema_id": event.schema_id,
        "schema_version": event.schema_version,
        "aggregate_version": event.aggregate_version,
        "max_attempts": event.max_attempts,
        "occurred_at": _iso(event.occurred_at),
        "available_at": _iso(event.available_at),
        "processing_started_at": _iso(found.processing_started_at),
        "lease_owner": found.lease_owner,
        "lease_until": _iso(found.lease_until),
        "lease_token": found.lease_token,
        "holds_key": found.holds_key,
        "headers": dict(event.headers),
        "errors": [dict(line) for line in found.errors],
        **(_payload(event) if payload else {}),
    }


def _summary(found: Found) -> dict[str, Any]:
    event = found.event
    return {
        "id": str(event.id),
        "seq": event.seq,
        "stream": event.stream,
        "consumer": found.consumer or None,
        "tenant": event.tenant,
        "topic": event.topic,
        "type": event.type,
        "key": event.key,
        "status": event.status.value,
        "attempts": event.attempts,
        "created_at": _iso(event.created_at),
        "next_attempt_at": _iso(found.next_attempt_at),
        "published_at": _iso(found.published_at),
        "replay_at": _iso(found.replay_at),
        "last_error": found.last_error,
        "last_error_at": _iso(found.last_error_at),
        "payload_bytes": found.payload_bytes,
        "unreadable": found.unreadable or None,
    }


def _payload(event: Event) -> dict[str, str]:
    try:
        return {"payload": event.payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(event.payload).decode()}


def stream_record(row: StreamRow) -> dict[str, Any]:
    """A stream with the number of its events by status."""
    return {
        "stream": row.stream,
        "mode": None if row.mode is None else row.mode.value,
        "destination": row.destination,
        "paused": row.paused,
        "workers": row.live_workers,
        "unserved": row.is_unserved,
        "waiting": row.waiting,
        "oldest_seconds": None if row.oldest_seconds is None else round(row.oldest_seconds, 3),
        **{each.value: count for each, count in row.counts.items()},
        "at_least": sorted(row.at_least),
        "held_keys": {mode.value: row.held_keys.get(mode, 0) for mode in HoldMode},
        "worker_list": [_worker_record(worker) for worker in row.workers],
        "reasons": row.reasons,
    }


def _worker_record(worker: WorkerStatus) -> dict[str, Any]:
    spans = ("seen_seconds", "free_seconds", "circuit_seconds")
    seconds = {name: getattr(worker, name) for name in spans}
    return worker._asdict() | {name: None if each is None else round(each, 3) for name, each in seconds.items()}


def consumer_record(row: ConsumerRow) -> dict[str, Any]:
    """A consumer with its processes."""
    return {
        "consumer": row.consumer,
        "source": row.source,
        "workers": row.live_workers,
        "lag_events": row.lag_events,
        "lag_seconds": None if row.lag_seconds is None else round(row.lag_seconds, 3),
        "lanes": row.lanes,
        "paused_lanes": row.paused_lanes,
        "held_keys": row.held_keys,
        "dead": row.dead,
        "worker_list": [_process_record(worker) for worker in row.workers],
    }


def _process_record(worker: ConsumerStatus) -> dict[str, Any]:
    report = worker.report._asdict()
    if worker.report.lag_seconds is not None:
        report["lag_seconds"] = round(worker.report.lag_seconds, 3)
    return {"name": worker.worker, "live": worker.live, "seen_seconds": round(worker.seen_seconds, 3), **report}


def audit_record(row: Audit) -> dict[str, Any]:
    """One action of an operator."""
    event_id = None if row.event_id is None else str(row.event_id)
    return row._asdict() | {"at": _iso(row.at), "event_id": event_id, "consumer": row.consumer or None}


def _iso(value: datetime | None) -> str | None:
    return None if value is None else iso(value)


def iso(value: datetime) -> str:
    """ISO 8601 in UTC, with milliseconds."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
