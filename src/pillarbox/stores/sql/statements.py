"""The statements that every SQL store shares, each with a sentence; what differs between databases is data.

``{name}`` is a table or a fragment of the dialect, ``:name`` a parameter, ``{later:x}`` the database's now plus ``:x``
seconds, ``{among:x}`` membership in the list ``:x``, ``{upsert:columns}`` and ``{ignore:column}`` what becomes of a row
that is there already. A status is always a literal: as a parameter it hides the partial index from a generic plan. An
UPDATE that needs a column's old value reads it before it assigns it: some databases go from left to right.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# In the order of the fields of Event, up to headers.
EVENT_COLUMNS: Final = (
    "id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, routing_key, payload,"
    " content_type, schema_id, schema_version, created_at, attempts, max_attempts, occurred_at, headers"
)
# A payload that is larger than its share of the batch stays behind, with its size told, until the batch is cut.
_READ_COLUMNS: Final = (
    EVENT_COLUMNS.replace(" payload,", " CASE WHEN {size} <= :inline THEN payload END AS payload,")
    + ", CASE WHEN {size} > :inline THEN {size} END AS bytes"
)
WRITE_COLUMNS: Final = (
    "id, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, key_hash, routing_key,"
    " payload, content_type, headers, schema_id, schema_version, occurred_at, available_at, next_attempt_at, status,"
    " max_attempts"
)
_MOVED: Final = (
    "id, seq, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, key_hash, routing_key,"
    " payload, content_type, headers, schema_id, schema_version, occurred_at, created_at, available_at, max_attempts,"
    " lease_token"
)
_FENCE: Final = "stream = :stream AND shard = :shard AND token = :token AND owner = :worker"
_WAITING: Final = "status IN ('pending', 'failed', 'held')"
# Errors are kept as JSON lines; the oldest are worth most, so that a long history stops growing at its end.
_HISTORY: Final = """CASE WHEN errors IS NULL THEN :line WHEN length(errors) > 16000 THEN errors
    ELSE {history} END"""


@dataclass(frozen=True)
class Dialect:
    """How one database says what the shared statements mean."""

    now: str
    later: str  # with {} for the parameter
    among: str  # with {} for the parameter
    has_meta: str  # FROM ... WHERE the table {meta} exists
    tables: str  # the name FROM ... WHERE it is a table of :schema, or of the schema that needs no name
    version: str  # of the server
    param: str  # "$" numbers the parameters, ":" names them, "%" is %s for each place of one
    skip_locked: str = ""
    share_lock: str = ""
    update_lock: str = ""
    use_ready: str = ""
    use_due: str = ""
    use_aside: str = ""
    use_leased: str = ""
    use_id: str = ""
    delete_event: str = "DELETE FROM {event}"  # the one by id
    upsert: str = "ON CONFLICT ({}) DO UPDATE SET"
    ignore: str = "ON CONFLICT DO NOTHING"
    key: str = "key"  # the column, where its name is a reserved word
    aside: str = "key = :key AND status IN ('failed', 'held')"
    size: str = "length(payload)"
    history: str = "errors || {newline} || :line"
    newline: str = "char(10)"
    floor: str = ""
    true: str = "1"
    false: str = "0"
    integer: str = "integer"


class _Macro:
    def __init__(self, text: str, mark: str = "") -> None:
        self.text = text
        self.mark = mark

    def __format__(self, argument: str) -> str:
        return self.text.format(f"{self.mark}{argument}")


class Statement:
    """SQL text in the driver's own style, with the names of its parameters in order."""

    __slots__ = ("names", "text")
    _PARAMETER = re.compile(r"(?<![:\w]):([a-z_][a-z_0-9]*)")
    _KEY = re.compile(r"(?<![:\w])key(?!\w)")

    def __init__(self, template: str, dialect: Dialect, names: Mapping[str, str]) -> None:
        fragments = {
            "skip_locked": dialect.skip_locked,
            "share_lock": dialect.share_lock,
            "update_lock": dialect.update_lock,
            "use_ready": dialect.use_ready.format(**names),
            "use_due": dialect.use_due.format(**names),
            "use_aside": dialect.use_aside.format(**names),
            "use_leased": dialect.use_leased.format(**names),
            "use_id": dialect.use_id,
            "delete_event": dialect.delete_event.format(**names),
            "aside": dialect.aside,
            "size": dialect.size,
            "floor": dialect.floor,
            "true": dialect.true,
            "false": dialect.false,
            "integer": dialect.integer,
            "has_meta": dialect.has_meta.format(**names),
            "tables": dialect.tables,
            "version": dialect.version,
            "now": dialect.now,
        }
        history = dialect.history.format(newline=dialect.newline)
        macros = {
            "later": _Macro(dialect.later, ":"),
            "among": _Macro(dialect.among, ":"),
            "upsert": _Macro(dialect.upsert),
            "ignore": _Macro(dialect.ignore),
        }
        text = self._KEY.sub(dialect.key, template.format(**names, **fragments, **macros, history=history))
        found = self._PARAMETER.findall(text)
        self.names: tuple[str, ...] = tuple(found if dialect.param == "%" else dict.fromkeys(found))
        if dialect.param == "%":
            text = self._PARAMETER.sub("%s", text.replace("%", "%%"))
        elif dialect.param == "$":
            number = {name: f"${place}" for place, name in enumerate(self.names, 1)}
            text = self._PARAMETER.sub(lambda match: number[match[1]], text)
        self.text = " ".join(text.split())


SHARED: Final[Mapping[str, str]] = {
    # Schema.
    "has_meta": "SELECT 1 {has_meta}",
    "meta": "SELECT name, value FROM {meta}",
    "tables": "SELECT {tables}",
    "version": "SELECT {version}",
    "set_meta": """INSERT INTO {meta} (name, value) VALUES (:name, :value)
        {upsert:name} value = :value""",
    # Writing.
    "add": f"INSERT INTO {{event}} ({WRITE_COLUMNS}) VALUES ("
    + ", ".join(f":{name.strip()}" for name in WRITE_COLUMNS.split(","))
    + ")",
    # A stream is announced by whoever serves it first.
    "announce": "INSERT INTO {stream} (name) VALUES (:stream) {ignore:name}",
    "announce_shard": """INSERT INTO {lease} (stream, shard) VALUES (:stream, :shard)
        {ignore:shard}""",
    "join": """INSERT INTO {worker} (stream, name, seen_until) VALUES (:stream, :worker, {later:seconds})
        {upsert:stream, name} seen_until = {later:seconds}""",
    # Names are never used twice, so those of workers long gone are removed by whoever leaves.
    "leave": """DELETE FROM {worker} WHERE stream = :stream
        AND (name = :worker OR seen_until < {later:long_ago})""",
    # Ownership: a token that grows, so that whoever lost a shard can change nothing of it.
    "takeable": """SELECT shard FROM {lease} WHERE stream = :stream AND (owner IS NULL OR lease_until < {now})
        ORDER BY shard LIMIT :limit {skip_locked}""",
    "take": """UPDATE {lease} SET unclean_count = unclean_count + CASE WHEN owner IS NULL THEN 0 ELSE 1 END,
        owner = :worker, token = token + 1, lease_until = {later:seconds}
        WHERE stream = :stream AND shard {among:shards}""",
    "taken": "SELECT shard, token, unclean_count, suspect FROM {lease} WHERE stream = :stream AND shard {among:shards}",
    "renew": f"UPDATE {{lease}} SET lease_until = {{later:seconds}} WHERE {_FENCE}",
    "give": f"UPDATE {{lease}} SET owner = NULL, lease_until = NULL, suspect = NULL WHERE {_FENCE}",
    "suspect": f"UPDATE {{lease}} SET suspect = :suspect WHERE {_FENCE}",
    "trust": f"UPDATE {{lease}} SET suspect = NULL, unclean_count = :unclean_count WHERE {_FENCE}",
    "fence": f"SELECT 1 FROM {{lease}} WHERE {_FENCE} {{share_lock}}",
    "owned": f"SELECT 1 FROM {{lease}} WHERE {_FENCE}",
    # A turn.
    "read": f"""SELECT {_READ_COLUMNS} FROM {{event}} {{use_ready}}
        WHERE stream = :stream AND shard = :shard AND status = 'pending' {{floor}}
        AND EXISTS (SELECT 1 FROM {{lease}} WHERE {_FENCE}) ORDER BY seq LIMIT :limit""",
    "payloads": "SELECT id, payload FROM {event} {use_id} WHERE id {among:ids}",
    "keys_aside": "SELECT key FROM {blocked_key} WHERE stream = :stream AND shard = :shard",
    "due_key": """SELECT key, mode, dead_head FROM {blocked_key} WHERE stream = :stream AND shard = :shard
        AND next_attempt_at <= {now} ORDER BY next_attempt_at LIMIT 1""",
    "read_key": f"""SELECT {_READ_COLUMNS}, status FROM {{event}} {{use_aside}}
        WHERE stream = :stream AND shard = :shard AND {{aside}}
        AND EXISTS (SELECT 1 FROM {{lease}} WHERE {_FENCE}) ORDER BY seq LIMIT :limit""",
    # Settling. An event's state is checked, so that doing it twice changes nothing.
    "publish": f"""UPDATE {{event}} {{use_id}} SET status = 'published', published_at = {{now}},
        attempts = attempts + 1 WHERE id {{among:ids}} AND {_WAITING}""",
    "publish_delete": f"{{delete_event}} WHERE id {{among:ids}} AND {_WAITING}",
    "fail": f"""UPDATE {{event}} SET
        errors = CASE WHEN status = 'failed' AND attempts = :attempts THEN errors ELSE {_HISTORY} END,
        status = 'failed', attempts = :attempts, next_attempt_at = {{later:delay}},
        last_error = :error, last_error_at = {{now}}
        WHERE id = :id AND {_WAITING}""",
    "hold": "UPDATE {event} {use_id} SET status = 'held' WHERE id {among:ids} AND status = 'pending'",
    # An id that died before and was written again has one dead letter, the new one.
    "unbury": """DELETE FROM {dead_letter} WHERE id {among:ids} AND EXISTS (SELECT 1 FROM {event}
        WHERE {event}.id = {dead_letter}.id AND {event}.status <> 'published')""",
    "bury": f"""INSERT INTO {{dead_letter}} ({_MOVED}, attempts, error, errors)
        SELECT {_MOVED}, :attempts, :error, {_HISTORY} FROM {{event}}
        WHERE id = :id AND status <> 'published'""",
    "remove": "{delete_event} WHERE id {among:ids} AND status <> 'published'",
    # Keys set aside: whoever changes one locks its row first and looks afterwards, in a statement of its own.
    "lock_keys": """SELECT key, mode FROM {blocked_key} WHERE stream = :stream AND shard = :shard AND key {among:keys}
        ORDER BY key {update_lock}""",
    "set_aside": """INSERT INTO {blocked_key} (stream, shard, key, mode, next_attempt_at, dead_head)
        VALUES (:stream, :shard, :key, :mode, {later:delay}, :dead_head)
        {upsert:stream, shard, key} mode = :mode, next_attempt_at = {later:delay}, dead_head = :dead_head""",
    "release_key": """DELETE FROM {blocked_key} WHERE stream = :stream AND shard = :shard AND key = :key
        AND mode = 'retry' AND NOT EXISTS (SELECT 1 FROM {event} {use_aside} WHERE stream = :stream AND shard = :shard
            AND {aside})""",
    # A blocked or parked key waits for what an operator does with the very event that it waits for.
    "free_key": """UPDATE {blocked_key} SET mode = 'retry', next_attempt_at = {now}, dead_head = NULL
        WHERE stream = :stream AND shard = :shard AND key = :key AND (mode = 'retry' OR dead_head = :id)""",
    # Instants that have come.
    "due_ids": """SELECT id FROM {event} {use_due} WHERE stream = :stream AND next_attempt_at <= {now}
        AND status IN ('scheduled', 'failed') AND suspect = {false}
        ORDER BY next_attempt_at LIMIT :limit {skip_locked}""",
    "promote": """UPDATE {event} {use_id} SET status = 'pending', next_attempt_at = NULL WHERE id {among:ids}
        AND status IN ('scheduled', 'failed')""",
    # Queue streams.
    "ready_ids": """SELECT id FROM {event} {use_ready} WHERE stream = :stream AND shard = :shard AND status = 'pending'
        ORDER BY seq LIMIT :limit {skip_locked}""",
    "suspect_ids": """SELECT id FROM {event} {use_due} WHERE stream = :stream AND next_attempt_at <= {now}
        AND status = 'failed' AND suspect = {true} ORDER BY next_attempt_at LIMIT 1 {skip_locked}""",
    "claim": """UPDATE {event} {use_id} SET status = 'processing', attempts = attempts + 1, next_attempt_at = NULL,
        lease_owner = :worker, lease_token = lease_token + 1, lease_until = {later:seconds},
        processing_started_at = {now} WHERE id {among:ids}""",
    "claimed": f"SELECT {EVENT_COLUMNS}, lease_token FROM {{event}} {{use_id}} WHERE id {{among:ids}} ORDER BY seq",
    "renew_claim": """UPDATE {event} SET lease_until = {later:seconds}
        WHERE id = :id AND status = 'processing' AND lease_token = :token""",
    "lock_claim": """SELECT id, lease_token FROM {event} {use_id} WHERE id {among:ids} AND status = 'processing'
        ORDER BY id {update_lock}""",
    "publish_claims": """UPDATE {event} {use_id} SET status = 'published', published_at = {now}, lease_owner = NULL,
        lease_until = NULL, suspect = {false} WHERE id {among:ids}""",
    "fail_claim": f"""UPDATE {{event}} SET status = 'failed', attempts = :attempts, next_attempt_at = {{later:delay}},
        last_error = :error, last_error_at = {{now}}, errors = {_HISTORY}, lease_owner = NULL, lease_until = NULL,
        suspect = {{false}} WHERE id = :id""",
    # A suspect stays one: it has not yet been worked alone to the end.
    "refund": """UPDATE {event} {use_id} SET status = CASE WHEN suspect = {true} THEN 'failed' ELSE 'pending' END,
        next_attempt_at = CASE WHEN suspect = {true} THEN {now} END, attempts = attempts - 1,
        lease_owner = NULL, lease_until = NULL WHERE id {among:ids}""",
    "stuck": """SELECT id, attempts, max_attempts, suspect FROM {event} {use_leased} WHERE stream = :stream
        AND status = 'processing' AND (lease_until < {now} OR processing_started_at < {later:stuck})
        ORDER BY lease_until LIMIT :limit {skip_locked}""",
    # A crash is charged to an event only if it was worked alone: else it is given back and waits to be worked alone.
    "rescue": f"""UPDATE {{event}} SET status = 'failed', attempts = :attempts, suspect = {{true}},
        next_attempt_at = {{now}}, lease_token = lease_token + 1, lease_owner = NULL, lease_until = NULL,
        last_error = :error, last_error_at = {{now}}, errors = {_HISTORY} WHERE id = :id""",
    # Retention. A page of the table in order of insertion: which are old and settled, and whether all are old.
    "prune_page": """SELECT seq, CASE WHEN status = 'published' AND published_at < {later:keep} THEN 1 ELSE 0 END,
        CASE WHEN created_at < {later:keep} THEN 1 ELSE 0 END
        FROM {event} WHERE seq > :after ORDER BY seq LIMIT :limit""",
    # The state is checked again: an operator may have replayed one meanwhile.
    "prune": """DELETE FROM {event} WHERE seq {among:seqs} AND status = 'published'
        AND published_at < {later:keep}""",
    # Dead letters whose key is blocked or parked are what an operator needs to free it.
    "prune_dead": """DELETE FROM {dead_letter} WHERE id IN (SELECT id FROM {dead_letter} AS d
        WHERE died_at < {later:keep} AND NOT EXISTS (SELECT 1 FROM {blocked_key} AS b WHERE b.stream = d.stream
            AND b.shard = d.shard AND b.key = d.key AND b.mode IN ('blocked', 'parked'))
        ORDER BY died_at LIMIT :limit)""",
    # Steering.
    "pause": """INSERT INTO {stream} (name, paused) VALUES (:stream, :paused)
        {upsert:name} paused = :paused""",
    "audit": "INSERT INTO {audit} (operator, action, stream, event_id) VALUES (:operator, :action, :stream, :event_id)",
    # One step per stream along the indexes, whatever the number of events.
    "waiting_streams": """WITH RECURSIVE found (stream) AS (
            SELECT ''
            UNION ALL
            SELECT (SELECT min(stream) FROM (
                SELECT min(stream) AS stream FROM {event} WHERE status = 'pending' AND stream > found.stream
                UNION ALL
                SELECT min(stream) FROM {event} WHERE next_attempt_at IS NOT NULL AND stream > found.stream
                UNION ALL
                SELECT min(stream) FROM {blocked_key} WHERE stream > found.stream) AS following)
            FROM found WHERE found.stream IS NOT NULL)
        SELECT stream FROM found WHERE stream <> '' AND NOT EXISTS (
            SELECT 1 FROM {worker} WHERE {worker}.stream = found.stream AND seen_until > {now})""",
    "count": "SELECT status, count(*) FROM {event} WHERE stream = :stream GROUP BY status",
    "count_dead": "SELECT count(*) FROM {dead_letter} WHERE stream = :stream",
    "dead_letters": f"""SELECT {EVENT_COLUMNS}, stream, died_at, error, errors FROM {{dead_letter}}
        WHERE stream = COALESCE(:stream, stream) ORDER BY died_at, seq LIMIT :limit""",
    # Operators.
    "lock_dead": """SELECT id, stream, shard, key FROM {dead_letter} WHERE id {among:ids}
        ORDER BY stream, shard, key, seq {update_lock}""",
    "exhume": f"""INSERT INTO {{event}} ({_MOVED}, attempts, status, last_error, last_error_at, errors)
        SELECT {_MOVED}, 0, :status, error, died_at, errors FROM {{dead_letter}} WHERE id = :id""",
    "remove_dead": "DELETE FROM {dead_letter} WHERE id {among:ids}",
    # One walk over the outbox for all streams; what is scheduled for later does not wait yet.
    "states": """SELECT stream, status, count(*), min(COALESCE(available_at, created_at)),
        sum(CASE WHEN published_at > {later:recently} THEN 1 ELSE 0 END) FROM {event} GROUP BY stream, status""",
    "dead_by_stream": "SELECT stream, count(*) FROM {dead_letter} GROUP BY stream",
    "known_streams": "SELECT name, paused FROM {stream}",
    "live_workers": "SELECT stream, count(*) FROM {worker} WHERE seen_until > {now} GROUP BY stream",
    "clock": "SELECT {now}",
    "audited": "SELECT at, operator, action, stream, event_id FROM {audit} ORDER BY id DESC LIMIT :limit",
}
# For operators: an event with all that is known of it; ``payload`` and ``errors`` are left out of lists.
FOUND: Final = (
    "SELECT " + EVENT_COLUMNS + ", stream, status, {size}, available_at, next_attempt_at, published_at,"
    " processing_started_at, lease_owner, lease_until, lease_token, last_error, last_error_at, errors, 0 FROM {event}"
)
FOUND_DEAD: Final = (
    "SELECT " + EVENT_COLUMNS + ", stream, 'dead', {size}, available_at, NULL, NULL, NULL, NULL, NULL, lease_token,"
    " error, died_at, errors, CASE WHEN EXISTS (SELECT 1 FROM {blocked_key} AS b WHERE b.stream = {dead_letter}.stream"
    " AND b.shard = {dead_letter}.shard AND b.key = {dead_letter}.key AND b.dead_head = {dead_letter}.id)"
    " THEN 1 ELSE 0 END FROM {dead_letter}"
)

# One branch for each shard that is asked about, joined with UNION ALL.
POLL: Final = """SELECT 'paused' AS kind, count(*) AS n FROM {stream} WHERE name = :stream AND paused = {true}
    UNION ALL SELECT 'live', count(*) FROM {worker} WHERE stream = :stream AND seen_until > {now}
    UNION ALL SELECT 'rank', count(*) FROM {worker} WHERE stream = :stream AND seen_until > {now} AND name < :worker
    UNION ALL SELECT 'free', count(*) FROM {lease} WHERE stream = :stream AND (owner IS NULL OR lease_until < {now})
    UNION ALL SELECT 'scheduled', 1 WHERE EXISTS (SELECT 1 FROM {event} {use_due} WHERE stream = :stream
        AND next_attempt_at <= {now} AND suspect = {false})
    UNION ALL SELECT 'suspects', 1 WHERE EXISTS (SELECT 1 FROM {event} {use_due} WHERE stream = :stream
        AND next_attempt_at <= {now} AND suspect = {true})"""
POLL_SHARD: Final = """SELECT 'ready', CAST(:shard_{n} AS {{integer}})
        WHERE EXISTS (SELECT 1 FROM {{event}} {{use_ready}}
        WHERE stream = :stream AND shard = :shard_{n} AND status = 'pending')
    UNION ALL SELECT 'due', CAST(:shard_{n} AS {{integer}}) WHERE EXISTS (SELECT 1 FROM {{blocked_key}}
        WHERE stream = :stream AND shard = :shard_{n} AND next_attempt_at <= {{now}})"""
