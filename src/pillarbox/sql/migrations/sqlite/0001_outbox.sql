CREATE TABLE {meta} (
    name text PRIMARY KEY,
    value text NOT NULL
)

CREATE TABLE {event} (
    -- AUTOINCREMENT: without it a deleted seq is given again.
    seq integer PRIMARY KEY AUTOINCREMENT,
    created_at text NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    occurred_at text,
    available_at text,
    next_attempt_at text,
    published_at text,
    processing_started_at text,
    lease_until text,
    lease_token integer NOT NULL DEFAULT 0,
    aggregate_version integer,
    last_error_at text,
    id text NOT NULL,
    key_hash integer NOT NULL CHECK (key_hash >= 0),
    attempts integer NOT NULL DEFAULT 0,
    max_attempts integer,
    shard integer NOT NULL GENERATED ALWAYS AS (key_hash % {shards}) STORED,
    suspect integer NOT NULL DEFAULT 0,
    status text NOT NULL,
    stream text NOT NULL,
    tenant text NOT NULL,
    topic text NOT NULL,
    type text NOT NULL,
    aggregate_type text,
    aggregate_id text,
    key text,
    routing_key text,
    content_type text NOT NULL,
    schema_id text,
    schema_version text,
    headers text,
    lease_owner text,
    last_error text,
    errors text,
    payload blob NOT NULL,
    UNIQUE (id, stream),
    -- The checks refuse, in its own transaction, a row that no relay could read or settle. Any column takes any type.
    CHECK (length(id) = 36 AND id GLOB '????????-????-????-????-????????????'),
    CHECK (status IN ('pending', 'published', 'failed', 'held', 'scheduled', 'processing')),
    CHECK (typeof(attempts) = 'integer' AND attempts >= 0),
    CHECK (typeof(max_attempts) IN ('integer', 'null') AND typeof(aggregate_version) IN ('integer', 'null')),
    CHECK (typeof(payload) = 'blob'),
    CHECK (headers IS NULL OR json_valid(headers) AND ltrim(headers) LIKE '{{%'),
    CHECK (created_at GLOB '[0-9][0-9][0-9][0-9]-[0-1][0-9]-[0-3][0-9] [0-2][0-9]:[0-5][0-9]:[0-5][0-9].[0-9]*'),
    CHECK (occurred_at GLOB '[0-9][0-9][0-9][0-9]-[0-1][0-9]-[0-3][0-9] [0-2][0-9]:[0-5][0-9]:[0-5][0-9].[0-9]*'),
    CHECK (available_at GLOB '[0-9][0-9][0-9][0-9]-[0-1][0-9]-[0-3][0-9] [0-2][0-9]:[0-5][0-9]:[0-5][0-9].[0-9]*'),
    CHECK (next_attempt_at GLOB '[0-9][0-9][0-9][0-9]-[0-1][0-9]-[0-3][0-9] [0-2][0-9]:[0-5][0-9]:[0-5][0-9].[0-9]*'),
    CHECK ('blob' NOT IN (typeof(stream), typeof(tenant), typeof(topic), typeof(type), typeof(aggregate_type),
        typeof(aggregate_id), typeof(key), typeof(routing_key), typeof(content_type), typeof(schema_id),
        typeof(schema_version), typeof(headers)))
)

CREATE INDEX {ready_index} ON {event} (stream, shard, seq) WHERE status = 'pending'

CREATE INDEX {held_index} ON {event} (stream, shard, key, seq) WHERE status IN ('failed', 'held')

CREATE INDEX {due_index} ON {event} (stream, next_attempt_at) WHERE next_attempt_at IS NOT NULL

CREATE INDEX {leased_index} ON {event} (stream, lease_until) WHERE status = 'processing'

CREATE TABLE {stream} (
    name text PRIMARY KEY,
    paused integer NOT NULL DEFAULT 0,
    mode text,
    destination text,
    created_at text NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now'))
)

CREATE TABLE {worker} (
    stream text NOT NULL,
    name text NOT NULL,
    seen_at text NOT NULL,
    seen_until text NOT NULL,
    circuit_at text,
    circuit_error text,
    version text,
    PRIMARY KEY (stream, name)
)

CREATE TABLE {lease} (
    stream text NOT NULL,
    shard integer NOT NULL,
    owner text,
    token integer NOT NULL DEFAULT 0,
    lease_until text,
    crashes integer NOT NULL DEFAULT 0,
    suspect text,
    alone integer NOT NULL DEFAULT 0,
    settled_batch text,
    PRIMARY KEY (stream, shard)
)

CREATE TABLE {held_key} (
    stream text NOT NULL,
    shard integer NOT NULL,
    key text NOT NULL,
    mode text NOT NULL,
    next_attempt_at text,
    dead_head text,
    PRIMARY KEY (stream, shard, key)
)

CREATE INDEX {held_due_index} ON {held_key} (stream, shard, next_attempt_at) WHERE next_attempt_at IS NOT NULL

-- consumer is empty for a dead letter of a relay. A relay's dead letter has the seq of its event, and one of a consumer
-- takes the next number. replay_at and the lease belong to consumers: a relay's replay deletes the row.
CREATE TABLE {dead_letter} (
    seq integer NOT NULL,
    created_at text NOT NULL,
    occurred_at text,
    available_at text,
    died_at text NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    replay_at text,
    lease_until text,
    lease_token integer NOT NULL DEFAULT 0,
    aggregate_version integer,
    id text NOT NULL,
    key_hash integer NOT NULL,
    attempts integer NOT NULL,
    max_attempts integer,
    shard integer NOT NULL GENERATED ALWAYS AS (key_hash % {shards}) STORED,
    stream text NOT NULL,
    tenant text NOT NULL,
    topic text NOT NULL,
    type text NOT NULL,
    aggregate_type text,
    aggregate_id text,
    key text,
    routing_key text,
    content_type text NOT NULL,
    schema_id text,
    schema_version text,
    headers text,
    lease_owner text,
    error text NOT NULL,
    errors text,
    payload blob NOT NULL,
    consumer text NOT NULL DEFAULT '',
    PRIMARY KEY (id, stream, consumer)
)

CREATE INDEX {dead_index} ON {dead_letter} (consumer, stream, died_at)

CREATE INDEX {replay_index} ON {dead_letter} (consumer, seq) WHERE replay_at IS NOT NULL

CREATE TABLE {audit} (
    id integer PRIMARY KEY,
    at text NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    operator text NOT NULL,
    action text NOT NULL,
    stream text NOT NULL,
    event_id text,
    consumer text NOT NULL DEFAULT ''
)

-- A process of a consumer, with what it tells of itself.
CREATE TABLE {consumer} (
    consumer text NOT NULL,
    name text NOT NULL,
    seen_at text NOT NULL,
    seen_until text NOT NULL,
    source text NOT NULL,
    lanes integer NOT NULL,
    paused_lanes integer NOT NULL,
    held_keys integer NOT NULL,
    lag_events integer,
    lag_seconds real,
    failed_lanes text NOT NULL,
    PRIMARY KEY (consumer, name)
)

CREATE TABLE {inbox} (
    consumer text NOT NULL,
    event_id text NOT NULL,
    processed_at text NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    aggregate_id text,
    aggregate_version integer,
    dead integer NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, event_id)
)

CREATE INDEX {inbox_age_index} ON {inbox} (processed_at)

-- aggregate is the SHA-256 of its type and id, name shows both to people.
CREATE TABLE {inbox_version} (
    consumer text NOT NULL,
    aggregate blob NOT NULL,
    version integer NOT NULL,
    event_id text NOT NULL,
    name text NOT NULL,
    PRIMARY KEY (consumer, aggregate)
)

-- id is the SHA-256 of scope and key. status, headers and body are those of the answer.
CREATE TABLE {idempotency} (
    id blob PRIMARY KEY,
    fingerprint blob NOT NULL,
    created_at text NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    status integer,
    headers text,
    body blob
)

CREATE INDEX {idempotency_age_index} ON {idempotency} (created_at)
