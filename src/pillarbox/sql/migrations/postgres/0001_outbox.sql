CREATE TABLE {meta} (
    name text PRIMARY KEY,
    value text NOT NULL
)

-- xid stands in front of seq: defaults are evaluated in the order of columns, so that a transaction has its id before it
-- takes a number. Reads rely on it. GENERATED ALWAYS, because BY DEFAULT an INSERT of several rows that names DEFAULT
-- takes its numbers first. The checks refuse, in its own transaction, a row that no relay could read or settle. They are
-- cheap, because every settle runs them too.
CREATE TABLE {event} (
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    seq bigint GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME {event_seq} CACHE 1),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    occurred_at timestamptz,
    available_at timestamptz,
    next_attempt_at timestamptz,
    published_at timestamptz,
    processing_started_at timestamptz,
    lease_until timestamptz,
    lease_token bigint NOT NULL DEFAULT 0,
    aggregate_version bigint,
    last_error_at timestamptz,
    id uuid NOT NULL,
    key_hash integer NOT NULL CHECK (key_hash >= 0),
    attempts integer NOT NULL DEFAULT 0,
    max_attempts integer,
    shard smallint NOT NULL GENERATED ALWAYS AS (key_hash % {shards}) STORED,
    suspect smallint NOT NULL DEFAULT 0,
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
    payload bytea NOT NULL,
    PRIMARY KEY (id, stream),
    CHECK (status IN ('pending', 'published', 'failed', 'held', 'scheduled', 'processing')),
    CHECK (attempts >= 0),
    CHECK (octet_length(key) <= 1020),
    CHECK (headers LIKE '{{%}}'),
    CHECK (created_at BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 23:59:59.999999+00'),
    CHECK (occurred_at BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 23:59:59.999999+00' OR NOT isfinite(occurred_at)),
    CHECK (available_at BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 23:59:59.999999+00' OR NOT isfinite(available_at))
) WITH (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.05
)

-- seq has no index of its own: the planner sometimes prefers it to this one and walks everything that was settled.
CREATE INDEX {ready_index} ON {event} (stream, shard, seq) WHERE status = 'pending'

CREATE INDEX {held_index} ON {event} (stream, shard, key, seq) WHERE status IN ('failed', 'held')

CREATE INDEX {due_index} ON {event} (stream, next_attempt_at, seq) WHERE next_attempt_at IS NOT NULL

CREATE INDEX {leased_index} ON {event} (stream, lease_until) WHERE status = 'processing'

CREATE TABLE {stream} (
    name text PRIMARY KEY,
    paused boolean NOT NULL DEFAULT false,
    mode text,
    destination text,
    created_at timestamptz NOT NULL DEFAULT now()
)

CREATE TABLE {worker} (
    stream text NOT NULL,
    name text NOT NULL,
    seen_at timestamptz NOT NULL,
    seen_until timestamptz NOT NULL,
    PRIMARY KEY (stream, name)
)

CREATE TABLE {lease} (
    stream text NOT NULL,
    shard smallint NOT NULL,
    owner text,
    token bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    crashes integer NOT NULL DEFAULT 0,
    suspect uuid,
    alone integer NOT NULL DEFAULT 0,
    PRIMARY KEY (stream, shard)
) WITH (fillfactor = 50)

CREATE TABLE {held_key} (
    stream text NOT NULL,
    shard smallint NOT NULL,
    key text NOT NULL,
    mode text NOT NULL,
    next_attempt_at timestamptz,
    dead_head uuid,
    PRIMARY KEY (stream, shard, key)
)

CREATE INDEX {held_due_index} ON {held_key} (stream, shard, next_attempt_at) WHERE next_attempt_at IS NOT NULL

CREATE TABLE {dead_letter} (
    seq bigint NOT NULL,
    created_at timestamptz NOT NULL,
    occurred_at timestamptz,
    available_at timestamptz,
    died_at timestamptz NOT NULL DEFAULT now(),
    aggregate_version bigint,
    id uuid NOT NULL,
    key_hash integer NOT NULL,
    attempts integer NOT NULL,
    max_attempts integer,
    shard smallint NOT NULL GENERATED ALWAYS AS (key_hash % {shards}) STORED,
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
    error text NOT NULL,
    errors text,
    payload bytea NOT NULL,
    PRIMARY KEY (id, stream)
)

CREATE INDEX {dead_index} ON {dead_letter} (stream, died_at)

CREATE TABLE {audit} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    operator text NOT NULL,
    action text NOT NULL,
    stream text NOT NULL,
    event_id uuid
)

CREATE TABLE {inbox} (
    processed_at timestamptz NOT NULL DEFAULT now(),
    aggregate_version bigint,
    event_id uuid NOT NULL,
    dead boolean NOT NULL DEFAULT false,
    consumer text NOT NULL,
    aggregate_id text,
    PRIMARY KEY (consumer, event_id)
)

CREATE INDEX {inbox_age_index} ON {inbox} (processed_at)

-- aggregate is the SHA-256 of its type and id, name shows both to people.
CREATE TABLE {inbox_version} (
    version bigint NOT NULL,
    event_id uuid NOT NULL,
    consumer text NOT NULL,
    aggregate bytea NOT NULL,
    name text NOT NULL,
    PRIMARY KEY (consumer, aggregate)
) WITH (fillfactor = 80)

-- id is the SHA-256 of scope and key. status, headers and body are those of the answer.
CREATE TABLE {idempotency} (
    created_at timestamptz NOT NULL DEFAULT now(),
    status smallint,
    id bytea PRIMARY KEY,
    fingerprint bytea NOT NULL,
    headers text,
    body bytea
)

CREATE INDEX {idempotency_age_index} ON {idempotency} (created_at)

CREATE TABLE {sleeper} (
    stream text NOT NULL,
    worker text NOT NULL,
    PRIMARY KEY (stream, worker)
)

-- NOTIFY takes a lock of the whole cluster until the commit is flushed, so a writer notifies only while a relay sleeps.
-- As a trigger it serves every driver, and the writer still needs no right but INSERT. The function runs with the rights
-- of its owner: it names its table with the schema, so that no temporary view of a caller can take the table's place.
DO $create$
BEGIN
    EXECUTE format($function$
        CREATE FUNCTION {wake}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
        SET search_path = pg_catalog, pg_temp AS $wake$
        BEGIN
            PERFORM pg_catalog.pg_notify('{channel}', stream) FROM %s WHERE stream IN (SELECT stream FROM added);
            RETURN NULL;
        END
        $wake$
    $function$, (SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c
        JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = '{sleeper}'::regclass));
END
$create$

REVOKE ALL ON FUNCTION {wake}() FROM PUBLIC

CREATE TRIGGER {wake_trigger} AFTER INSERT ON {event} REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION {wake}()
