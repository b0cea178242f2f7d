-- The statements of the PostgreSQL store. stores/sql/statements.sql has those that it shares with others.
--
-- set_config('synchronous_commit', 'on', true) makes the commit of this transaction wait for the disk, whatever the
-- default of the server or the role is: a lease or a settle that was answered and is lost in a crash makes copies. It
-- stands in the statement itself, because an application's pool has its own settings and a pooler refuses ours.

-- lock_migration: Keep other migrations of this outbox out until the transaction ends.
SELECT pg_advisory_xact_lock(hashtext(:name))

-- has_table: A row if there is such a table.
SELECT 1 WHERE to_regclass(:table) IS NOT NULL

-- tables: The tables of the schema, by default of the current one.
SELECT tablename FROM pg_tables WHERE schemaname = coalesce(lower(:schema), current_schema())

-- version: The version of the server.
SELECT current_setting('server_version')

-- has_aggregate_index: A row if events are indexed by their aggregate.
SELECT 1 FROM pg_indexes WHERE indexname = lower('{aggregate_index}')
    AND schemaname = coalesce(lower(:schema), current_schema())

-- join: Register a worker as live. The first error of an open circuit says since when it is open.
INSERT INTO {worker} AS w (stream, name, seen_at, seen_until, version, circuit_error, circuit_at)
VALUES (:stream, :worker, now(), now() + :seconds * interval '1 second', :version, :circuit_error::text,
    CASE WHEN :circuit_error::text IS NOT NULL THEN now() END)
ON CONFLICT (stream, name) DO UPDATE SET seen_at = excluded.seen_at, seen_until = excluded.seen_until,
    version = excluded.version, circuit_error = excluded.circuit_error,
    circuit_at = CASE WHEN excluded.circuit_at IS NOT NULL THEN coalesce(w.circuit_at, excluded.circuit_at) END

-- leave: Remove a worker, and those that were last seen a day ago: their names are never used again.
DELETE FROM {worker} WHERE stream = :stream AND (name = :worker OR seen_until < now() - interval '1 day')

-- poll: How the stream is shared and what there is to do. LATERAL with LIMIT 1 is one step into the index for each
-- shard, which no planner turns into a join over all events.
SELECT 'paused', count(*) FROM {stream} WHERE name = :stream AND paused
UNION ALL SELECT 'live', count(*) FROM {worker} WHERE stream = :stream AND seen_until > now()
UNION ALL SELECT 'rank', count(*) FROM {worker} WHERE stream = :stream AND seen_until > now() AND name < :worker
UNION ALL SELECT 'free', count(*) FROM {lease} WHERE stream = :stream AND (owner IS NULL OR lease_until < now())
UNION ALL SELECT 'scheduled', 1 WHERE EXISTS (
    SELECT 1 FROM {event} WHERE stream = :stream AND next_attempt_at <= now() AND suspect = 0)
UNION ALL SELECT 'suspects', 1 WHERE EXISTS (
    SELECT 1 FROM {event} WHERE stream = :stream AND next_attempt_at <= now() AND suspect > 0)
UNION ALL SELECT 'ready', s.shard FROM unnest(:shards::int[], :floors::bigint[]) AS s (shard, floor)
    CROSS JOIN LATERAL (SELECT 1 FROM {event} AS e WHERE e.stream = :stream AND e.shard = s.shard
        AND e.status = 'pending' AND e.seq >= s.floor LIMIT 1) AS first
UNION ALL SELECT 'due', s.shard FROM unnest(:shards::int[]) AS s (shard)
    CROSS JOIN LATERAL (SELECT 1 FROM {held_key} AS h WHERE h.stream = :stream AND h.shard = s.shard
        AND h.next_attempt_at <= now() LIMIT 1) AS first

-- doze: A worker wants to be woken by the trigger. That is a hint: its commit need not wait for the disk.
INSERT INTO {sleeper} (stream, worker) VALUES (:stream, :worker) ON CONFLICT DO NOTHING
RETURNING set_config('synchronous_commit', 'off', true)

-- wake: A worker is awake. Its commit need not wait either.
DELETE FROM {sleeper} WHERE stream = :stream AND worker = :worker
RETURNING set_config('synchronous_commit', 'off', true)

-- wake_dead: Forget workers that were killed while they slept.
DELETE FROM {sleeper} AS s WHERE NOT EXISTS (
    SELECT 1 FROM {worker} AS w WHERE w.stream = s.stream AND w.name = s.worker AND w.seen_until > now())

-- takeable: Shards that nobody owns, or whose lease has run out; those that another takes at this moment are passed
-- over.
SELECT shard, owner, set_config('synchronous_commit', 'on', true) FROM {lease}
WHERE stream = :stream AND (owner IS NULL OR lease_until < now())
ORDER BY shard LIMIT :limit FOR UPDATE SKIP LOCKED

-- take: Own shards. Each gets a new token, so that an earlier owner can change nothing any more.
UPDATE {lease} SET crashes = crashes + CASE WHEN owner IS NULL THEN 0 ELSE 1 END,
    owner = :worker, token = :token::bigint + shard, lease_until = now() + :seconds * interval '1 second'
WHERE stream = :stream AND shard = ANY(:shards)

-- taken: The leases as they are now.
SELECT shard, token, crashes, suspect, alone FROM {lease} WHERE stream = :stream AND shard = ANY(:shards)

-- renew_all: Extend all leases of a worker. Rows that a settle holds at this moment are passed over, so nothing can
-- deadlock.
UPDATE {lease} AS l SET lease_until = now() + :seconds * interval '1 second' FROM (
    SELECT shard, set_config('synchronous_commit', 'on', true) FROM {lease}
    WHERE stream = :stream AND shard = ANY(:shards) AND token = ANY(:tokens) AND owner = :worker
    FOR UPDATE SKIP LOCKED) AS free
WHERE l.stream = :stream AND l.shard = free.shard

-- renew: Extend one lease.
UPDATE {lease} SET lease_until = now() + :seconds * interval '1 second'
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker
RETURNING set_config('synchronous_commit', 'on', true)

-- fence: A row if the shard is ours; nobody takes it over until the transaction ends. With FOR KEY SHARE, or with
-- EXISTS alone, a settle and a take-over can cross.
SELECT set_config('synchronous_commit', 'on', true) FROM {lease}
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker FOR SHARE

-- settled_batch: The batch that a shard settled last, if it is ours; nobody takes it over until the transaction ends.
SELECT settled_batch, set_config('synchronous_commit', 'on', true) FROM {lease}
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker FOR UPDATE

-- note_batch: Note the batch that is settled, if the shard is ours and settled the one before, or this one already;
-- nobody takes it over until the transaction ends.
UPDATE {lease} SET settled_batch = :batch
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker
    AND (settled_batch IN (:before, :batch) OR settled_batch IS NULL AND :before::uuid IS NULL)
RETURNING set_config('synchronous_commit', 'on', true)

-- present: Those of these events that are in the outbox.
SELECT id FROM {event} WHERE id = ANY(:ids) AND stream = :stream

-- busy: Workers whose lease of a shard runs, with when the last one runs out.
SELECT owner, max(lease_until) FROM {lease} WHERE owner IS NOT NULL AND lease_until >= now() GROUP BY owner

-- read: Pending events of a shard from a floor on, in order, if the shard is ours. A payload of more than :inline bytes
-- stays behind, and the last column has its size. If the stream is paused, one row without an id: a read that found
-- nothing lifts the floor, and this one has not looked.
(SELECT id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, routing_key,
    CASE WHEN length(payload) <= :inline THEN payload END AS payload, content_type, schema_id, schema_version,
    created_at, attempts, max_attempts, occurred_at, headers, available_at,
    CASE WHEN length(payload) > :inline THEN length(payload) END AS bytes
FROM {event} WHERE stream = :stream AND shard = :shard AND status = 'pending' AND seq >= :floor AND EXISTS (
    SELECT 1 FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker)
    AND NOT EXISTS (SELECT 1 FROM {stream} WHERE name = :stream AND paused)
ORDER BY seq LIMIT :limit)
UNION ALL SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL FROM {stream} WHERE name = :stream AND paused

-- read_joint: The same for several shards, each with its floor; the last column is the shard. The inner SELECT depends on
-- the lease, so that it runs shard by shard and ends as soon as :limit is reached. An outer ORDER BY would read :limit
-- events of every shard first.
(SELECT e.*, l.shard FROM unnest(:shards::int[], :tokens::bigint[], :floors::bigint[]) AS s (shard, token, floor)
JOIN {lease} AS l ON l.stream = :stream AND l.shard = s.shard AND l.token = s.token AND l.owner = :worker
CROSS JOIN LATERAL (
    SELECT id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, routing_key,
        CASE WHEN length(payload) <= :inline THEN payload END AS payload, content_type, schema_id, schema_version,
        created_at, attempts, max_attempts, occurred_at, headers, available_at,
        CASE WHEN length(payload) > :inline THEN length(payload) END AS bytes
    FROM {event} WHERE stream = :stream AND shard = l.shard AND status = 'pending' AND seq >= s.floor
    ORDER BY seq LIMIT :limit) AS e
WHERE NOT EXISTS (SELECT 1 FROM {stream} WHERE name = :stream AND paused) LIMIT :limit)
UNION ALL SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL FROM {stream} WHERE name = :stream AND paused

-- payloads: Payloads that stayed behind.
SELECT id, payload FROM {event} WHERE id = ANY(:ids) AND stream = :stream

-- look: The last seq that was given, a transaction id that is higher than all before it, and the lowest id that is
-- still under way. Before its first use a sequence says 1 too.
SELECT CASE WHEN is_called THEN last_value ELSE 0 END, pg_current_xact_id()::text::bigint,
    pg_snapshot_xmin(pg_current_snapshot())::text::bigint
FROM {event_seq}

-- due_key: The held key of a shard whose time has come first.
SELECT key, mode, dead_head FROM {held_key} WHERE stream = :stream AND shard = :shard AND next_attempt_at <= now()
ORDER BY next_attempt_at LIMIT 1

-- publish_fenced: Mark a batch as published if the shard is ours, in one statement.
WITH guard AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'on', true) FROM {lease}
    WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker FOR SHARE)
UPDATE {event} SET status = 'published', published_at = now(), attempts = least(attempts, 2147483646) + 1
WHERE id = ANY(:ids) AND stream = :stream AND status IN ('pending', 'failed', 'held') AND EXISTS (SELECT 1 FROM guard)

-- delete_fenced: Delete a batch that was published if the shard is ours, in one statement.
WITH guard AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'on', true) FROM {lease}
    WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker FOR SHARE)
DELETE FROM {event}
WHERE id = ANY(:ids) AND stream = :stream AND status IN ('pending', 'failed', 'held') AND EXISTS (SELECT 1 FROM guard)

-- publish_joint: Mark the events of several shards as published if all of these shards are ours, in one statement. The
-- leases are locked in the order of their shards.
WITH guard AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'on', true) FROM {lease} AS l
    JOIN unnest(:shards::int[], :tokens::bigint[]) AS s (shard, token) ON s.shard = l.shard AND s.token = l.token
    WHERE l.stream = :stream AND l.owner = :worker ORDER BY l.shard FOR SHARE OF l)
UPDATE {event} SET status = 'published', published_at = now(), attempts = least(attempts, 2147483646) + 1
WHERE id = ANY(:ids) AND stream = :stream AND status IN ('pending', 'failed', 'held')
    AND (SELECT count(*) FROM guard) = cardinality(:shards::int[])

-- delete_joint: The same where nothing is kept.
WITH guard AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'on', true) FROM {lease} AS l
    JOIN unnest(:shards::int[], :tokens::bigint[]) AS s (shard, token) ON s.shard = l.shard AND s.token = l.token
    WHERE l.stream = :stream AND l.owner = :worker ORDER BY l.shard FOR SHARE OF l)
DELETE FROM {event}
WHERE id = ANY(:ids) AND stream = :stream AND status IN ('pending', 'failed', 'held')
    AND (SELECT count(*) FROM guard) = cardinality(:shards::int[])

-- publish: Mark events as published. The status is checked, so that a settle can be repeated.
UPDATE {event} SET status = 'published', published_at = now(), attempts = least(attempts, 2147483646) + 1
WHERE id = ANY(:ids) AND stream = :stream AND status IN ('pending', 'failed', 'held')

-- remove: Delete events that are dead letters now, or that need not be kept after they were published.
DELETE FROM {event} WHERE id = ANY(:ids) AND stream = :stream AND status <> 'published'

-- fail: An event failed, or its worker died (:suspect) and loses its lease. Errors are JSON lines; a long history stops
-- growing at its end, because the oldest errors are worth most.
UPDATE {event} SET errors = CASE WHEN status = 'failed' AND attempts = :attempts OR length(errors) > 16000 THEN errors
        ELSE coalesce(errors, '') || :line END,
    status = 'failed', attempts = :attempts, next_attempt_at = now() + :delay * interval '1 second',
    last_error = :error, last_error_at = now(), suspect = :suspect::smallint,
    lease_owner = NULL, lease_until = NULL, lease_token = CASE WHEN :suspect::smallint > 0 THEN 0 ELSE lease_token END
WHERE id = :id AND stream = :stream AND status IN ('pending', 'failed', 'held', 'processing')

-- hold: Pending events wait behind their key.
UPDATE {event} SET status = 'held' WHERE id = ANY(:ids) AND stream = :stream AND status = 'pending'

-- lock_keys: How keys are held, locked first: an operator who decides about one at this moment is seen by what follows.
SELECT key, mode FROM {held_key} WHERE stream = :stream AND shard = :shard AND key = ANY(:keys) ORDER BY key FOR UPDATE

-- hold_key: Hold a key, or change its mode.
INSERT INTO {held_key} (stream, shard, key, mode, next_attempt_at, dead_head)
VALUES (:stream, :shard, :key, :mode, now() + :delay * interval '1 second', :dead_head)
ON CONFLICT (stream, shard, key) DO UPDATE
SET mode = excluded.mode, next_attempt_at = excluded.next_attempt_at, dead_head = excluded.dead_head

-- free_key: An operator decided about an event: its key goes on, unless it waits for another one.
UPDATE {held_key} SET mode = 'retrying', next_attempt_at = now(), dead_head = NULL
WHERE stream = :stream AND shard = :shard AND key = :key AND (mode = 'retrying' OR dead_head = :id)

-- due: Events whose instant has come, earliest first.
SELECT id, status FROM {event} WHERE stream = :stream AND next_attempt_at <= now()
    AND status IN ('scheduled', 'failed') AND suspect = 0
ORDER BY next_attempt_at, seq LIMIT :limit FOR UPDATE SKIP LOCKED

-- return: Failed events become pending, in their old places.
UPDATE {event} SET status = 'pending', next_attempt_at = NULL
WHERE id = ANY(:ids) AND stream = :stream AND status = 'failed'

-- reenter: An event becomes pending at the end of its stream. One by one: an UPDATE of several rows takes them in any
-- order.
UPDATE {event} SET status = 'pending', next_attempt_at = NULL, seq = DEFAULT WHERE id = :id AND stream = :stream

-- claim: Lease pending events of a shard, each charged an attempt, and pass over those that others lease at this
-- moment.
UPDATE {event} SET status = 'processing', attempts = least(attempts, 2147483646) + 1, next_attempt_at = NULL,
    lease_owner = :worker, lease_token = :token, lease_until = now() + :seconds * interval '1 second',
    processing_started_at = now()
WHERE stream = :stream AND id = ANY(ARRAY(SELECT id FROM {event}
    WHERE stream = :stream AND shard = :shard AND status = 'pending' ORDER BY seq LIMIT :limit FOR UPDATE SKIP LOCKED))
RETURNING id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, routing_key, payload,
    content_type, schema_id, schema_version, created_at, attempts, max_attempts, occurred_at, headers,
    available_at, lease_token, set_config('synchronous_commit', 'on', true)

-- claim_suspect: Lease one event that was in a crash.
UPDATE {event} SET status = 'processing', attempts = least(attempts, 2147483646) + 1, next_attempt_at = NULL,
    lease_owner = :worker, lease_token = :token, lease_until = now() + :seconds * interval '1 second',
    processing_started_at = now()
WHERE stream = :stream AND id = ANY(ARRAY(SELECT id FROM {event}
    WHERE stream = :stream AND next_attempt_at <= now() AND status = 'failed' AND suspect > 0
    ORDER BY next_attempt_at LIMIT 1 FOR UPDATE SKIP LOCKED))
RETURNING id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, routing_key, payload,
    content_type, schema_id, schema_version, created_at, attempts, max_attempts, occurred_at, headers,
    available_at, lease_token, set_config('synchronous_commit', 'on', true)

-- renew_claim: Extend the lease of an event.
UPDATE {event} SET lease_until = now() + :seconds * interval '1 second'
WHERE id = :id AND stream = :stream AND status = 'processing' AND lease_token = :token
RETURNING set_config('synchronous_commit', 'on', true)

-- lock_claims: The tokens of leased events, locked: nobody rescues them until the transaction ends.
SELECT id, lease_token, set_config('synchronous_commit', 'on', true) FROM {event}
WHERE id = ANY(:ids) AND stream = :stream AND status = 'processing'
ORDER BY id FOR UPDATE

-- publish_claims: Mark leased events as published.
UPDATE {event} SET status = 'published', published_at = now(), lease_owner = NULL, lease_until = NULL, suspect = 0
WHERE id = ANY(:ids) AND stream = :stream

-- refund: Give leased events back uncharged. A suspect stays one, because it did not run alone to the end.
UPDATE {event} SET status = CASE WHEN suspect > 0 THEN 'failed' ELSE 'pending' END,
    next_attempt_at = CASE WHEN suspect > 0 THEN now() END, attempts = attempts - 1, lease_owner = NULL, lease_until = NULL
WHERE id = ANY(:ids) AND stream = :stream

-- stuck: Leased events whose worker died, or has held them for too long.
SELECT id, attempts, suspect FROM {event} WHERE stream = :stream AND status = 'processing'
    AND (lease_until < now() OR processing_started_at < now() - :stuck * interval '1 second')
ORDER BY lease_until LIMIT :limit FOR UPDATE SKIP LOCKED

-- prune_page: Events in order of their ids, which is that of time, and whether each can go. Without an upper bound:
-- with one, and no statistics, the planner scans the whole table.
SELECT id, stream, status = 'published' AND published_at < now() - :keep * interval '1 second' FROM {event}
WHERE (id, stream) > (:id, :stream) ORDER BY id, stream LIMIT :limit

-- prune: Delete events that can go. Checked again, because an operator may have replayed one meanwhile.
DELETE FROM {event}
WHERE id = ANY(:ids) AND status = 'published' AND published_at < now() - :keep * interval '1 second'

-- prune_dead: Delete old dead letters, but none that an operator needs to free a blocked or parked key, and none that a
-- consumer shall apply again.
DELETE FROM {dead_letter} WHERE (id, stream, consumer) IN (SELECT d.id, d.stream, d.consumer FROM {dead_letter} AS d
    WHERE died_at < now() - :keep * interval '1 second' AND replay_at IS NULL AND NOT EXISTS (
        SELECT 1 FROM {held_key} AS h WHERE h.stream = d.stream AND h.shard = d.shard AND h.key = d.key
        AND h.mode IN ('blocked', 'parked') AND d.consumer = '')
    ORDER BY died_at LIMIT :limit)

-- prune_inbox: Forget events that were processed long ago.
DELETE FROM {inbox} WHERE (consumer, event_id) IN (SELECT consumer, event_id FROM {inbox}
    WHERE processed_at < now() - :keep * interval '1 second' ORDER BY processed_at LIMIT :limit)

-- prune_idempotency: Delete old idempotency keys with their answers.
DELETE FROM {idempotency} WHERE id IN (SELECT id FROM {idempotency}
    WHERE created_at < now() - :keep * interval '1 second' ORDER BY created_at LIMIT :limit)

-- clock: The database's time, as an instant and as seconds.
SELECT now(), extract(epoch FROM now())::float8

-- lock_dead: Dead letters of a stream, locked in the order in which everybody locks them.
SELECT id, shard, key, seq FROM {dead_letter} WHERE id = ANY(:ids) AND stream = :stream AND consumer = :consumer
ORDER BY shard, key, seq FOR UPDATE

-- revive: A dead letter becomes an event again, in its old place.
INSERT INTO {event} (id, seq, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key,
    key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, status, last_error, last_error_at, errors)
OVERRIDING SYSTEM VALUE
SELECT id, seq, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key,
    key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, :status, error, died_at, errors
FROM {dead_letter} WHERE id = :id AND stream = :stream AND consumer = ''

-- is_one_of: A condition for find_events and find_dead_letters.
e.id = ANY(:ids)

-- live_workers: The live workers of each stream.
SELECT stream, count(*) FROM {worker} WHERE seen_until > now() GROUP BY stream

-- gauges: A stream's events by state, each counted up to :limit in the index that has them, with the oldest instant
-- since when one waits. Without ORDER BY a planner without statistics scans the table. Of pending events the first of
-- each shard is the oldest.
SELECT 'ready' AS place, 'pending' AS state, count(*) AS events, NULL::timestamptz AS since FROM (
    SELECT 1 FROM {event} WHERE stream = :stream AND status = 'pending' ORDER BY shard, seq LIMIT :limit) AS part
UNION ALL SELECT 'first', 'pending', 0, min(since) FROM (SELECT (
    SELECT coalesce(available_at, created_at) FROM {event}
    WHERE stream = :stream AND shard = number AND status = 'pending' ORDER BY seq LIMIT 1) AS since
    FROM generate_series(0, :last_shard::int) AS number) AS firsts
UNION ALL SELECT 'both', status, count(*), min(since) FROM (
    SELECT status, coalesce(available_at, created_at) AS since FROM {event}
    WHERE stream = :stream AND status IN ('failed', 'held') ORDER BY shard, key, seq LIMIT :limit) AS part GROUP BY status
UNION ALL SELECT 'leased', 'processing', count(*), min(since) FROM (
    SELECT coalesce(available_at, created_at) AS since FROM {event}
    WHERE stream = :stream AND status = 'processing' ORDER BY lease_until LIMIT :limit) AS part
UNION ALL SELECT 'due', status, count(*), NULL FROM (
    SELECT status FROM {event} WHERE stream = :stream AND next_attempt_at IS NOT NULL
    ORDER BY next_attempt_at DESC LIMIT :limit) AS part GROUP BY status
UNION ALL SELECT 'dead', 'dead', count(*), NULL FROM (
    SELECT 1 FROM {dead_letter} WHERE consumer = '' AND stream = :stream ORDER BY died_at LIMIT :limit) AS part
UNION ALL SELECT 'keys', mode, count(*), NULL FROM (
    SELECT mode FROM {held_key} WHERE stream = :stream ORDER BY shard, key LIMIT :limit) AS part GROUP BY mode

-- lock_letter: The errors of a consumer's dead letter, locked: an operator who replays it now comes before or after.
SELECT errors FROM {dead_letter} WHERE id = :id AND stream = :stream AND consumer = :consumer FOR UPDATE

-- bury_again: A dead letter that was replayed has died again.
UPDATE {dead_letter} SET died_at = now(), attempts = :attempts, error = :error, errors = :errors,
    replay_at = NULL, lease_owner = NULL, lease_until = NULL, lease_token = 0
WHERE id = :id AND stream = :stream AND consumer = :consumer
RETURNING set_config('synchronous_commit', 'on', true)

-- order_replay: The consumer shall apply a dead letter again.
UPDATE {dead_letter} SET replay_at = now()
WHERE id = :id AND stream = :stream AND consumer = :consumer

-- due_replays: Dead letters that a consumer shall apply again and that nobody has leased, in order of seq; those that
-- another process leases now are passed over.
SELECT e.id, e.seq, e.tenant, e.topic, e.type, e.aggregate_type, e.aggregate_id, e.aggregate_version, e.key,
    e.routing_key, e.payload, e.content_type, e.schema_id, e.schema_version, e.created_at, e.attempts, e.max_attempts,
    e.occurred_at, e.headers, e.available_at, e.stream, e.error
FROM {dead_letter} AS e WHERE e.consumer = :consumer AND e.replay_at <= now()
    AND (e.lease_until IS NULL OR e.lease_until < now())
ORDER BY e.seq LIMIT :limit FOR UPDATE SKIP LOCKED

-- lease_replays: Lease dead letters.
UPDATE {dead_letter} SET lease_owner = :worker, lease_token = :token,
    lease_until = now() + :seconds * interval '1 second'
WHERE id = ANY(:ids) AND consumer = :consumer AND replay_at IS NOT NULL

-- report: Register a process of a consumer as live, with what it tells of itself.
INSERT INTO {consumer} (consumer, name, seen_at, seen_until, source, lanes, paused_lanes, held_keys, lag_events,
    lag_seconds, failed_lanes)
VALUES (:consumer, :worker, now(), now() + :seconds * interval '1 second',
    :source, :lanes, :paused_lanes, :held_keys, :lag_events, :lag_seconds, :failed_lanes)
ON CONFLICT (consumer, name) DO UPDATE SET seen_at = excluded.seen_at, seen_until = excluded.seen_until,
    source = excluded.source, lanes = excluded.lanes, paused_lanes = excluded.paused_lanes,
    held_keys = excluded.held_keys, lag_events = excluded.lag_events, lag_seconds = excluded.lag_seconds,
    failed_lanes = excluded.failed_lanes

-- bury: Write the dead letter of a consumer.
INSERT INTO {dead_letter} (id, stream, consumer, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version,
    key, key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, attempts, error, errors)
VALUES (:id, :stream, :consumer, :tenant, :topic, :type, :aggregate_type, :aggregate_id, :aggregate_version,
    :key, :key_hash, :routing_key, :payload, :content_type, :headers, :schema_id, :schema_version, :occurred_at,
    :created_at, :available_at, :max_attempts, :attempts, :error, :errors)
RETURNING set_config('synchronous_commit', 'on', true)

-- finish_replay: Delete the dead letter of a replay that succeeded, if the lease still counts.
DELETE FROM {dead_letter} WHERE id = :id AND stream = :stream AND consumer = :consumer AND lease_token = :token
RETURNING set_config('synchronous_commit', 'on', true)

-- lock_published: Published events of a stream, locked in the order in which everybody locks events.
SELECT id, shard, key, seq FROM {event} WHERE id = ANY(:ids) AND stream = :stream AND status = 'published'
ORDER BY shard, key, seq FOR UPDATE

-- unpublish: A published event waits again, from now on.
UPDATE {event} SET status = 'failed', attempts = 0, published_at = NULL, suspect = 0, available_at = now()
WHERE id = :id AND stream = :stream AND status = 'published'

-- settings: Settings of the server and of this user that matter to a relay, with their units.
SELECT name, setting, unit FROM pg_settings WHERE name IN ('statement_timeout', 'lock_timeout',
    'idle_in_transaction_session_timeout', 'idle_session_timeout', 'transaction_timeout', 'fsync',
    'synchronous_commit', 'autovacuum', 'max_connections', 'superuser_reserved_connections')

-- open_connections: The connections of all users.
SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'

-- oldest_transaction: What keeps deleted rows for longest: a transaction, a prepared one, or a replication slot's.
SELECT * FROM (
    SELECT extract(epoch FROM now() - xact_start)::float8 AS seconds, 'the transaction of process ' || pid AS what
    FROM pg_stat_activity WHERE xact_start IS NOT NULL AND backend_type = 'client backend' AND pid <> pg_backend_pid()
    UNION ALL SELECT extract(epoch FROM now() - prepared)::float8, 'the prepared transaction ' || gid
    FROM pg_prepared_xacts) AS oldest
ORDER BY seconds DESC LIMIT 1

-- invalid_indexes: Indexes of the outbox that an interrupted build has left.
SELECT i.indexrelid::regclass::text FROM pg_index AS i
WHERE i.indrelid IN (to_regclass('{event}'), to_regclass('{dead_letter}'), to_regclass('{held_key}')) AND NOT i.indisvalid
