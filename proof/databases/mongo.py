"""MongoDB: the harness logs each change of the outbox from a change stream, in the order of the oplog."""

import json
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import MongoClient, UpdateOne
from pymongo.errors import PyMongoError

from pillarbox.ids import uuid7
from proof.content import QUEUE, fingerprint, payload, sha256_of, stream_of
from proof.databases.base import Database, Writer, Written
from proof.history import Change, Effect, Final, Requested, Witness

_CODEC: CodecOptions[dict[str, Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD, tz_aware=True)
_WAITING = ["pending", "failed", "held", "processing"]
_WATCHED = ("event", "lease", "held_key", "dead_letter", "audit")


class MongoWriter(Writer):
    """A client whose transaction changes its keys, adds events, and writes the witness."""

    def __init__(self, database: Database, planted: str | None = None) -> None:
        super().__init__(database, planted)
        self._client: MongoClient[dict[str, Any]] = MongoClient(database.url, timeoutMS=20_000)

    def transact(self, wanted: Sequence[Written], *, commit: bool, hold_seconds: float) -> tuple[str, list[str]]:
        ids: list[str] = []
        with self._client.start_session() as session:
            try:
                session.start_transaction()
                ids.extend(self._write(session, each) for each in sorted(wanted))
                if hold_seconds:
                    self.wait(hold_seconds)
                if not commit:
                    session.abort_transaction()
                    return "rolled_back", ids
            except Exception:
                with suppress(PyMongoError):
                    session.abort_transaction()
                return "failed", ids
            try:
                session.commit_transaction()
            except PyMongoError as error:
                return ("failed" if error.has_error_label("TransientTransactionError") else "unknown"), ids
        return "ok", ids

    def _write(self, tx: Any, each: Written) -> str:
        business = tx.client.get_default_database()
        counter = business["proof_key"].find_one_and_update(
            {"_id": each.key}, {"$inc": {"n": 1}}, return_document=True, session=tx
        )
        assert counter is not None
        n = counter["n"]
        event_id, mark = uuid7(), f"{each.key}/{n}"
        body = payload(n, each.size, each.fate)
        self._add(tx, each, event_id, mark, body)
        sha256 = fingerprint(each.key, body, mark)
        row = {"_id": str(event_id), "k": each.key, "n": n, "sha256": sha256, "fate": each.fate}
        business["proof_witness"].insert_one(row, session=tx)
        return str(event_id)

    def close(self) -> None:
        self._client.close()


class MongoProof(Database):
    """One node, or with ``nodes = 3`` a set whose primary can be killed."""

    name = "mongo"
    nodes: ClassVar[int] = 1

    def __init__(self, folder: Path, url: str | None = None) -> None:
        super().__init__(folder, url)
        self._server: Any = None
        if url is None:
            from servers import Mongo, MongoSet

            self._server = (Mongo() if self.nodes == 1 else MongoSet()).start()
        self._killed: Any = None
        self._client: MongoClient[dict[str, Any]] = MongoClient(self.url, socketTimeoutMS=20_000)
        self._database = self._client.get_default_database(codec_options=_CODEC)
        self._watching = threading.Event()
        self._stop = threading.Event()
        self._seen = ""
        self._thread: threading.Thread | None = None

    @property
    def server(self) -> Any:
        return self._server

    @property
    def url(self) -> str:
        if self._url is not None:
            return self._url
        return str(self._server.url.replace("/?", "/proof?"))

    def through(self, port: int) -> str:
        return f"mongodb://127.0.0.1:{port}/proof?directConnection=true"

    @property
    def port(self) -> int | None:
        # Clients of a replica set connect to the addresses that its nodes announce, past any proxy.
        return super().port if self.nodes == 1 else None

    def prepare(self, keys: Sequence[str]) -> None:
        self.migrate()
        self._database["proof_key"].bulk_write(
            [UpdateOne({"_id": key}, {"$set": {"n": 0}}, upsert=True) for key in keys]
        )
        self._database.create_collection("proof_witness")
        self._database.create_collection("proof_effect")
        self._database.create_collection("proof_request")
        self._database.create_collection("proof_end")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._watching.wait(30)

    def writer(self, planted: str | None = None) -> Writer:
        return MongoWriter(self, planted)

    def cut_sessions(self) -> None:
        self._client.admin.command("killAllSessions", [])

    def sample(self) -> tuple[int, float, int]:
        events = self._database["outbox_event"]
        # The events of a blocked key wait for an operator, not for a relay.
        blocked = [row["key"] for row in self._database["outbox_held_key"].find({"mode": "blocked"}, {"key": 1})]
        waiting = {"status": {"$in": _WAITING}, "key": {"$nin": blocked}}
        count = events.count_documents(waiting)
        oldest = events.find_one({**waiting, "last_error_at": None}, {"seq": 1}, sort=[("seq", 1)])
        age = max(0.0, time.time() - oldest["seq"].time) if oldest else 0.0
        connections = self._client.admin.command("serverStatus")["connections"]["current"]
        return count, age, connections

    def witness(self) -> Iterable[Witness]:
        for row in self._database["proof_witness"].find():
            yield Witness(row["_id"], stream_of(row["k"]), row["k"], row["n"], row["sha256"], row["fate"])

    def sessions(self) -> Any:
        return self._client

    def apply(self, tx: Any, event_id: str) -> None:
        tx.client.get_default_database()["proof_effect"].insert_one({"event_id": event_id}, session=tx)

    def effects(self) -> Iterable[Effect]:
        for row in self._database["proof_effect"].find():
            yield Effect(row["event_id"])

    def keep(self, tx: Any, key: str, body: str, answer: str) -> None:
        row = {"k": key, "body": body, "answer": answer}
        tx.client.get_default_database()["proof_request"].insert_one(row, session=tx)

    def requests(self) -> Iterable[Requested]:
        for row in self._database["proof_request"].find():
            yield Requested(row["k"], row["body"], sha256_of(row["answer"].encode()))

    def _watch(self) -> None:
        """Write down the raw changes. ``Meaning`` interprets them at the end."""
        wanted = [{"$match": {"ns.coll": {"$in": [f"outbox_{name}" for name in _WATCHED] + ["proof_end"]}}}]
        position = None
        with (self.folder / "oplog.jsonl").open("w") as log:
            while not self._stop.is_set():
                # After a short interruption the driver resumes by itself; after a long one it must be told where.
                with suppress(PyMongoError), self._database.watch(wanted, resume_after=position) as stream:
                    self._watching.set()
                    for change in stream:
                        if change["ns"]["coll"] == "proof_end":
                            return
                        log.write(json.dumps(_raw(change), default=str) + "\n")
                        position = stream.resume_token

    def changes(self) -> Iterable[Change]:
        self._database["proof_end"].insert_one({})
        if self._thread is not None:
            self._thread.join(60)
            if self._thread.is_alive():
                raise RuntimeError("the change stream did not come to its end")
        log = Meaning()
        with (self.folder / "oplog.jsonl").open() as lines:
            for seq, line in enumerate(lines, 1):
                if (change := log.change(seq, json.loads(line))) is not None:
                    yield change

    def final(self) -> Final:
        states = {
            _event_id(row["_id"]): row["status"] for row in self._database["outbox_event"].find({}, {"status": 1})
        }
        letters = self._database["outbox_dead_letter"].find({}, {"attempts": 1, "error": 1})
        dead = {_event_id(row["_id"]): {"attempts": row["attempts"], "error": row["error"]} for row in letters}
        audit = [
            {"by": row["operator"], "action": row["action"], "event_id": str(row.get("event_id"))}
            for row in self._database["outbox_audit"].find()
        ]
        return Final(states, dead, audit)

    def version(self) -> str:
        return f"MongoDB {self._client.server_info()['version']}, {self.nodes} node{'s' * (self.nodes > 1)}"

    def crash(self) -> None:
        """Kill the node; of three nodes, the primary."""
        self._killed = self._server if self.nodes == 1 else self._server.primary()
        self._killed.kill()

    def come_back(self) -> None:
        if self._killed is not None:
            self._killed.start()

    def close(self) -> None:
        self._stop.set()
        self._client.close()
        super().close()


class MongoSetProof(MongoProof):
    """Three nodes."""

    name = "mongo-set"
    nodes = 3


def _event_id(identity: Any) -> str:
    """The ``_id`` of an event and of a dead letter is its id and its stream. In a run an id stands in one stream."""
    return str(identity["id"] if isinstance(identity, dict) and "id" in identity else identity)


def _raw(change: dict[str, Any]) -> dict[str, Any]:
    document = dict(change.get("fullDocument") or {})
    document.pop("payload", None)
    updated = change.get("updateDescription") or {}
    return {
        "at": change["wallTime"].timestamp(),
        "coll": change["ns"]["coll"].removeprefix("outbox_"),
        "op": change["operationType"],
        "id": _event_id(change["documentKey"]["_id"]),
        "full": _plain(document),
        "set": _plain(updated.get("updatedFields") or {}),
        "unset": list(updated.get("removedFields") or ()),
    }


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.timestamp() if hasattr(value, "timestamp") else value
        for name, value in document.items()
        if name not in ("seq", "errors", "headers", "session", "payload")
    }


class Meaning:
    """Turns raw changes into those of a history. It remembers the fields that an update does not repeat."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[str, Any]] = {}
        self._tokens: dict[tuple[str, int], int] = {}

    def change(self, seq: int, raw: dict[str, Any]) -> Change | None:
        place = (raw["coll"], raw["id"])
        before = self._known.get(place, {})
        if raw["op"] == "delete":
            after = dict(before)
            self._known.pop(place, None)
        else:
            after = dict(raw["full"]) if raw["op"] in ("insert", "replace") else {**before, **raw["set"]}
            for name in raw["unset"]:
                after.pop(name, None)
            self._known[place] = after
        gone = raw["op"] == "delete"
        new = raw["op"] == "insert"
        common: dict[str, Any] = {"seq": seq, "at": raw["at"], "stream": after.get("stream", "")}
        common |= {"shard": after.get("shard"), "key": after.get("key")}
        held = self._tokens.get((after.get("stream", ""), after.get("shard", -1)))
        if raw["coll"] == "lease":
            token = after["token"]
            self._tokens[after["stream"], after["shard"]] = token
            if not ({"owner", "token", "lease_until"} & raw["set"].keys() or new or "lease_until" in raw["unset"]):
                return None
            until = after.get("lease_until")
            return Change(kind="lease", owner=after.get("owner"), token=token, until=until, **common)
        if raw["coll"] == "event":
            if not (new or gone or {"status", "attempts"} & raw["set"].keys()):
                return None
            old, now = None if new else before.get("status"), None if gone else after["status"]
            attempts = after.get("attempts")
            return Change(
                kind="event",
                event_id=raw["id"],
                old=old,
                new=now,
                attempts=attempts,
                token=None if new else after.get("lease_token") if common["stream"] == QUEUE else held,
                **common,
            )
        if raw["coll"] == "held_key":
            if not (new or gone or "mode" in raw["set"]):
                return None
            return Change(
                kind="held_key", old=None if new else before.get("mode"), new=None if gone else after["mode"], **common
            )
        if raw["coll"] == "dead_letter":
            return Change(
                kind="dead",
                event_id=raw["id"],
                old="dead" if gone else None,
                new=None if gone else "dead",
                attempts=after.get("attempts"),
                **common,
            )
        return Change(
            kind="audit", event_id=after.get("event_id"), new=after.get("action"), owner=after.get("operator"), **common
        )
