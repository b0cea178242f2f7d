-- The statements of the SQLite store. stores/sql/statements.sql has those that it shares with others.
--
-- An instant is text of a fixed length, so that comparing it compares instants. A list is a JSON array. Nothing is
-- locked: a transaction that writes is alone from its beginning.

-- has_table: A row if there is such a table.
SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :table

-- tables: The tables of the file.
SELECT name FROM sqlite_master WHERE type = 'table'

-- version: The version of the library.
SELECT sqlite_version()

-- has_aggregate_index: A row if events are indexed by their aggregate.
SELECT 1 FROM sqlite_master WHERE type = 'index' AND name = '{aggregate_index}'

-- join: Register a worker as live. The first error of an open circuit says since when it is open.
INSERT INTO {worker} AS w (stream, name, seen_at, seen_until, version, circuit_error, circuit_at)
VALUES (:stream, :worker, strftime('%Y-%m-%d %H:%M:%f', 'now'),
    strftime('%Y-%m-%d %H:%M:%f', 'now', :seconds || ' seconds'), :version, :circuit_error,
    CASE WHEN :circuit_error IS NOT NULL THEN strftime('%Y-%m-%d %H:%M:%f', 'now') END)
ON CONFLICT (stream, name) DO UPDATE SET seen_at = excluded.seen_at, seen_until = excluded.seen_until,
    version = excluded.version, circuit_error = excluded.circuit_error,
    circuit_at = CASE WHEN excluded.circuit_at IS NOT NULL THEN coalesce(w.circuit_at, excluded.circuit_at) END

-- leave: Remove a worker, and those that were last seen a day ago: their names are never used again.
DELETE FROM {worker}
WHERE stream = :stream AND (name = :worker OR seen_until < strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 day'))

-- poll: The stream's workers and the work to do.
SELECT 'paused', count(*) FROM {stream} WHERE name = :stream AND paused
UNION ALL SELECT 'live', count(*) FROM {worker}
    WHERE stream = :stream AND seen_until > strftime('%Y-%m-%d %H:%M:%f', 'now')
UNION ALL SELECT 'rank', count(*) FROM {worker}
    WHERE stream = :stream AND seen_until > strftime('%Y-%m-%d %H:%M:%f', 'now') AND name < :worker
UNION ALL SELECT 'free', count(*) FROM {lease}
    WHERE stream = :stream AND (owner IS NULL OR lease_until < strftime('%Y-%m-%d %H:%M:%f', 'now'))
UNION ALL SELECT 'scheduled', 1 WHERE EXISTS (SELECT 1 FROM {event}
    WHERE stream = :stream AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now') AND suspect = 0)
UNION ALL SELECT 'suspects', 1 WHERE EXISTS (SELECT 1 FROM {event}
    WHERE stream = :stream AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now') AND suspect > 0)
UNION ALL SELECT 'ready', s.value FROM json_each(:shards) AS s WHERE EXISTS (
    SELECT 1 FROM {event} INDEXED BY {ready_index} WHERE stream = :stream AND shard = s.value AND status = 'pending')
UNION ALL SELECT 'due', s.value FROM json_each(:shards) AS s WHERE EXISTS (SELECT 1 FROM {held_key}
    WHERE stream = :stream AND shard = s.value AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now'))

-- takeable: Shards that nobody owns, or whose lease has run out.
SELECT shard, owner FROM {lease}
WHERE stream = :stream AND (owner IS NULL OR lease_until < strftime('%Y-%m-%d %H:%M:%f', 'now'))
ORDER BY shard LIMIT :limit

-- take: Own shards. Each gets a new token, so that an earlier owner can change nothing any more.
UPDATE {lease} SET crashes = crashes + CASE WHEN owner IS NULL THEN 0 ELSE 1 END, owner = :worker,
    token = :token + shard, lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', :seconds || ' seconds')
WHERE stream = :stream AND shard IN (SELECT value FROM json_each(:shards))

-- taken: The leases as they are now.
SELECT shard, token, crashes, suspect, alone FROM {lease}
WHERE stream = :stream AND shard IN (SELECT value FROM json_each(:shards))

-- renew_all: Extend all leases of a worker.
UPDATE {lease} SET lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', :seconds || ' seconds')
WHERE stream = :stream AND shard IN (SELECT value FROM json_each(:shards))
    AND token IN (SELECT value FROM json_each(:tokens)) AND owner = :worker

-- renew: Extend one lease.
UPDATE {lease} SET lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', :seconds || ' seconds')
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker

-- fence: A row if the shard is ours.
SELECT 1 FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker

-- settled_batch: The batch that a shard settled last, if it is ours.
SELECT settled_batch FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker

-- present: Those of these events that are in the outbox.
SELECT id FROM {event} WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream

-- busy: Workers whose lease of a shard runs, with when the last one runs out.
SELECT owner, max(lease_until) FROM {lease}
WHERE owner IS NOT NULL AND lease_until >= strftime('%Y-%m-%d %H:%M:%f', 'now') GROUP BY owner

-- fence_joint: How many of these shards are ours.
SELECT count(*) FROM {lease} WHERE stream = :stream AND shard IN (SELECT value FROM json_each(:shards))
    AND token IN (SELECT value FROM json_each(:tokens)) AND owner = :worker

-- read: Pending events of a shard in order, if the shard is ours. A payload of more than :inline bytes stays behind,
-- and the last column has its size.
SELECT id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, routing_key,
    CASE WHEN length(payload) <= :inline THEN payload END AS payload, content_type, schema_id, schema_version,
    created_at, attempts, max_attempts, occurred_at, headers, available_at,
    CASE WHEN length(payload) > :inline THEN length(payload) END AS bytes
FROM {event} INDEXED BY {ready_index} WHERE stream = :stream AND shard = :shard AND status = 'pending' AND EXISTS (
    SELECT 1 FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker)
    AND NOT EXISTS (SELECT 1 FROM {stream} WHERE name = :stream AND paused)
ORDER BY seq LIMIT :limit

-- read_joint: The same for several shards; the last column is the shard. From lease to lease: the two indexes give the
-- order.
SELECT e.id, e.seq, e.tenant, e.topic, e.type, e.aggregate_type, e.aggregate_id, e.aggregate_version, e.key,
    e.routing_key, CASE WHEN length(e.payload) <= :inline THEN e.payload END AS payload, e.content_type, e.schema_id,
    e.schema_version, e.created_at, e.attempts, e.max_attempts, e.occurred_at, e.headers, e.available_at,
    CASE WHEN length(e.payload) > :inline THEN length(e.payload) END AS bytes, l.shard
FROM {lease} AS l CROSS JOIN {event} AS e INDEXED BY {ready_index}
WHERE l.stream = :stream AND l.shard IN (SELECT value FROM json_each(:shards))
    AND l.token IN (SELECT value FROM json_each(:tokens)) AND l.owner = :worker
    AND e.stream = :stream AND e.shard = l.shard AND e.status = 'pending'
    AND NOT EXISTS (SELECT 1 FROM {stream} WHERE name = :stream AND paused)
ORDER BY l.shard, e.seq LIMIT :limit

-- payloads: Payloads that stayed behind.
SELECT id, payload FROM {event} WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream

-- due_key: The held key of a shard whose time has come first.
SELECT key, mode, dead_head FROM {held_key}
WHERE stream = :stream AND shard = :shard AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
ORDER BY next_attempt_at LIMIT 1

-- publish: Mark events as published. The status is checked, so that a settle can be repeated.
UPDATE {event} SET status = 'published', published_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    attempts = min(attempts, 2147483646) + 1
WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream AND status IN ('pending', 'failed', 'held')

-- remove: Delete events that are dead letters now, or that need not be kept after they were published.
DELETE FROM {event} WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream AND status <> 'published'

-- fail: An event failed, or its worker died (:suspect) and loses its lease. Errors are JSON lines; a long history stops
-- growing at its end, because the oldest errors are worth most.
UPDATE {event} SET errors = CASE WHEN status = 'failed' AND attempts = :attempts OR length(errors) > 16000 THEN errors
        ELSE coalesce(errors, '') || :line END,
    status = 'failed', attempts = :attempts,
    next_attempt_at = strftime('%Y-%m-%d %H:%M:%f', 'now', :delay || ' seconds'),
    last_error = :error, last_error_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), suspect = :suspect,
    lease_owner = NULL, lease_until = NULL, lease_token = CASE WHEN :suspect > 0 THEN 0 ELSE lease_token END
WHERE id = :id AND stream = :stream AND status IN ('pending', 'failed', 'held', 'processing')

-- hold: Pending events wait behind their key.
UPDATE {event} SET status = 'held'
WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream AND status = 'pending'

-- lock_keys: How keys are held.
SELECT key, mode FROM {held_key}
WHERE stream = :stream AND shard = :shard AND key IN (SELECT value FROM json_each(:keys))

-- hold_key: Hold a key, or change its mode.
INSERT INTO {held_key} (stream, shard, key, mode, next_attempt_at, dead_head)
VALUES (:stream, :shard, :key, :mode, strftime('%Y-%m-%d %H:%M:%f', 'now', :delay || ' seconds'), :dead_head)
ON CONFLICT (stream, shard, key) DO UPDATE
SET mode = excluded.mode, next_attempt_at = excluded.next_attempt_at, dead_head = excluded.dead_head

-- free_key: An operator decided about an event: its key goes on, unless it waits for another one.
UPDATE {held_key}
SET mode = 'retrying', next_attempt_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), dead_head = NULL
WHERE stream = :stream AND shard = :shard AND key = :key AND (mode = 'retrying' OR dead_head = :id)

-- due: Events whose instant has come, earliest first.
SELECT id, status FROM {event} WHERE stream = :stream AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
    AND status IN ('scheduled', 'failed') AND suspect = 0
ORDER BY next_attempt_at, seq LIMIT :limit

-- return: Failed events become pending, in their old places.
UPDATE {event} SET status = 'pending', next_attempt_at = NULL
WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream AND status = 'failed'

-- ready: Pending events of a shard.
SELECT id FROM {event} INDEXED BY {ready_index} WHERE stream = :stream AND shard = :shard AND status = 'pending'
ORDER BY seq LIMIT :limit

-- suspects: One event that was in a crash.
SELECT id FROM {event} WHERE stream = :stream AND next_attempt_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
    AND status = 'failed' AND suspect > 0
ORDER BY next_attempt_at LIMIT 1

-- claim: Lease events, each charged an attempt.
UPDATE {event} SET status = 'processing', attempts = min(attempts, 2147483646) + 1, next_attempt_at = NULL,
    lease_owner = :worker, lease_token = :token,
    lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', :seconds || ' seconds'),
    processing_started_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream

-- claimed: The events that were leased, with their tokens.
SELECT id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, routing_key, payload,
    content_type, schema_id, schema_version, created_at, attempts, max_attempts, occurred_at, headers,
    available_at, lease_token
FROM {event} WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream ORDER BY seq

-- renew_claim: Extend the lease of an event.
UPDATE {event} SET lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', :seconds || ' seconds')
WHERE id = :id AND stream = :stream AND status = 'processing' AND lease_token = :token

-- lock_claims: The tokens of leased events.
SELECT id, lease_token FROM {event}
WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream AND status = 'processing'

-- publish_claims: Mark leased events as published.
UPDATE {event} SET status = 'published', published_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), lease_owner = NULL,
    lease_until = NULL, suspect = 0
WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream

-- refund: Give leased events back uncharged. A suspect stays one, because it did not run alone to the end.
UPDATE {event} SET status = CASE WHEN suspect > 0 THEN 'failed' ELSE 'pending' END,
    next_attempt_at = CASE WHEN suspect > 0 THEN strftime('%Y-%m-%d %H:%M:%f', 'now') END, attempts = attempts - 1,
    lease_owner = NULL, lease_until = NULL
WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream

-- stuck: Leased events whose worker died, or has held them for too long.
SELECT id, attempts, suspect FROM {event} WHERE stream = :stream AND status = 'processing'
    AND (lease_until < strftime('%Y-%m-%d %H:%M:%f', 'now')
        OR processing_started_at < strftime('%Y-%m-%d %H:%M:%f', 'now', -:stuck || ' seconds'))
ORDER BY lease_until LIMIT :limit

-- prune_page: Events in order of seq: whether each can go, and whether it is old. What is young ends the walk.
SELECT seq, status = 'published' AND published_at < strftime('%Y-%m-%d %H:%M:%f', 'now', -:keep || ' seconds'),
    created_at < strftime('%Y-%m-%d %H:%M:%f', 'now', -:keep || ' seconds')
FROM {event} WHERE seq > :after ORDER BY seq LIMIT :limit

-- prune: Delete events that can go. Checked again, because an operator may have replayed one meanwhile.
DELETE FROM {event} WHERE seq IN (SELECT value FROM json_each(:seqs)) AND status = 'published'
    AND published_at < strftime('%Y-%m-%d %H:%M:%f', 'now', -:keep || ' seconds')

-- prune_dead: Delete old dead letters, but none that an operator needs to free a blocked or parked key, and none that a
-- consumer shall apply again.
DELETE FROM {dead_letter} WHERE (id, stream, consumer) IN (SELECT d.id, d.stream, d.consumer FROM {dead_letter} AS d
    WHERE died_at < strftime('%Y-%m-%d %H:%M:%f', 'now', -:keep || ' seconds') AND replay_at IS NULL AND NOT EXISTS (
        SELECT 1 FROM {held_key} AS h WHERE h.stream = d.stream AND h.shard = d.shard AND h.key = d.key
        AND h.mode IN ('blocked', 'parked') AND d.consumer = '')
    ORDER BY died_at LIMIT :limit)

-- prune_inbox: Forget events that were processed long ago.
DELETE FROM {inbox} WHERE (consumer, event_id) IN (SELECT consumer, event_id FROM {inbox}
    WHERE processed_at < strftime('%Y-%m-%d %H:%M:%f', 'now', -:keep || ' seconds')
    ORDER BY processed_at LIMIT :limit)

-- prune_idempotency: Delete old idempotency keys with their answers.
DELETE FROM {idempotency} WHERE id IN (SELECT id FROM {idempotency}
    WHERE created_at < strftime('%Y-%m-%d %H:%M:%f', 'now', -:keep || ' seconds')
    ORDER BY created_at LIMIT :limit)

-- clock: The database's time.
SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')

-- lock_dead: Dead letters of a stream.
SELECT id, shard, key, seq FROM {dead_letter} WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream
    AND consumer = :consumer

-- is_one_of: A condition for find_events and find_dead_letters.
e.id IN (SELECT value FROM json_each(:ids))

-- live_workers: The live workers of each stream.
SELECT stream, count(*) FROM {worker} WHERE seen_until > strftime('%Y-%m-%d %H:%M:%f', 'now') GROUP BY stream

-- gauges: A stream's events by state, each counted up to :limit in the index that has them, with the oldest instant
-- since when one waits. Of pending events the first of each shard is the oldest.
SELECT 'ready', 'pending', count(*), NULL FROM (
    SELECT 1 FROM {event} INDEXED BY {ready_index} WHERE stream = :stream AND status = 'pending' LIMIT :limit)
UNION ALL SELECT 'first', 'pending', 0, min(since) FROM (
    WITH RECURSIVE number (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n < :last_shard)
    SELECT (SELECT coalesce(available_at, created_at) FROM {event} INDEXED BY {ready_index}
        WHERE stream = :stream AND shard = n AND status = 'pending' ORDER BY seq LIMIT 1) AS since FROM number)
UNION ALL SELECT 'both', status, count(*), min(since) FROM (
    SELECT status, coalesce(available_at, created_at) AS since FROM {event} INDEXED BY {held_index}
    WHERE stream = :stream AND status IN ('failed', 'held') LIMIT :limit) GROUP BY status
UNION ALL SELECT 'leased', 'processing', count(*), min(since) FROM (
    SELECT coalesce(available_at, created_at) AS since FROM {event} INDEXED BY {leased_index}
    WHERE stream = :stream AND status = 'processing' LIMIT :limit)
UNION ALL SELECT 'due', status, count(*), NULL FROM (
    SELECT status FROM {event} INDEXED BY {due_index} WHERE stream = :stream AND next_attempt_at IS NOT NULL
    ORDER BY next_attempt_at DESC LIMIT :limit) GROUP BY status
UNION ALL SELECT 'dead', 'dead', count(*), NULL FROM (
    SELECT 1 FROM {dead_letter} INDEXED BY {dead_index} WHERE consumer = '' AND stream = :stream LIMIT :limit)
UNION ALL SELECT 'keys', mode, count(*), NULL FROM (
    SELECT mode FROM {held_key} WHERE stream = :stream LIMIT :limit) GROUP BY mode

-- lock_letter: The errors of a consumer's dead letter.
SELECT errors FROM {dead_letter} WHERE id = :id AND stream = :stream AND consumer = :consumer

-- bury_again: A dead letter that was replayed has died again.
UPDATE {dead_letter} SET died_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), attempts = :attempts, error = :error, errors = :errors,
    replay_at = NULL, lease_owner = NULL, lease_until = NULL, lease_token = 0
WHERE id = :id AND stream = :stream AND consumer = :consumer

-- order_replay: The consumer shall apply a dead letter again.
UPDATE {dead_letter} SET replay_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
WHERE id = :id AND stream = :stream AND consumer = :consumer

-- due_replays: Dead letters that a consumer shall apply again and that nobody has leased, in order of seq.
SELECT e.id, e.seq, e.tenant, e.topic, e.type, e.aggregate_type, e.aggregate_id, e.aggregate_version, e.key,
    e.routing_key, e.payload, e.content_type, e.schema_id, e.schema_version, e.created_at, e.attempts, e.max_attempts,
    e.occurred_at, e.headers, e.available_at, e.stream, e.error
FROM {dead_letter} AS e WHERE e.consumer = :consumer AND e.replay_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
    AND (e.lease_until IS NULL OR e.lease_until < strftime('%Y-%m-%d %H:%M:%f', 'now'))
ORDER BY e.seq LIMIT :limit

-- lease_replays: Lease dead letters.
UPDATE {dead_letter} SET lease_owner = :worker, lease_token = :token,
    lease_until = strftime('%Y-%m-%d %H:%M:%f', 'now', :seconds || ' seconds')
WHERE id IN (SELECT value FROM json_each(:ids)) AND consumer = :consumer AND replay_at IS NOT NULL

-- report: Register a process of a consumer as live, with what it tells of itself.
INSERT INTO {consumer} (consumer, name, seen_at, seen_until, source, lanes, paused_lanes, held_keys, lag_events,
    lag_seconds, failed_lanes)
VALUES (:consumer, :worker, strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now', :seconds || ' seconds'),
    :source, :lanes, :paused_lanes, :held_keys, :lag_events, :lag_seconds, :failed_lanes)
ON CONFLICT (consumer, name) DO UPDATE SET seen_at = excluded.seen_at, seen_until = excluded.seen_until,
    source = excluded.source, lanes = excluded.lanes, paused_lanes = excluded.paused_lanes,
    held_keys = excluded.held_keys, lag_events = excluded.lag_events, lag_seconds = excluded.lag_seconds,
    failed_lanes = excluded.failed_lanes

-- bury: Write the dead letter of a consumer. Its seq is the next one: a transaction that writes is alone.
INSERT INTO {dead_letter} (seq, id, stream, consumer, tenant, topic, type, aggregate_type, aggregate_id,
    aggregate_version, key, key_hash, routing_key, payload, content_type, headers, schema_id, schema_version,
    occurred_at, created_at, available_at, max_attempts, attempts, error, errors)
VALUES ((SELECT coalesce(max(seq), 0) + 1 FROM {dead_letter} WHERE consumer > ''), :id, :stream, :consumer, :tenant,
    :topic, :type, :aggregate_type, :aggregate_id, :aggregate_version, :key, :key_hash, :routing_key, :payload,
    :content_type, :headers, :schema_id, :schema_version, :occurred_at, :created_at, :available_at, :max_attempts,
    :attempts, :error, :errors)

-- lock_published: Published events of a stream, locked in the order in which everybody locks events.
SELECT id, shard, key, seq FROM {event}
WHERE id IN (SELECT value FROM json_each(:ids)) AND stream = :stream AND status = 'published'

-- unpublish: A published event waits again, from now on.
UPDATE {event} SET status = 'failed', attempts = 0, published_at = NULL, suspect = 0, available_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
WHERE id = :id AND stream = :stream AND status = 'published'
