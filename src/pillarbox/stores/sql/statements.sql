-- Statements in the SQL that most databases understand. A database whose words differ has its own text of that name.
--
-- {event} and the like are names of tables and indexes, :name is a parameter. A status is always a literal: as a
-- parameter it hides partial indexes from a planner. `key` is a word of MySQL; behind a dot it needs no quotes.

-- meta: The version of the schema and the number of shards.
SELECT name, value FROM {meta}

-- set_meta: Note a value of the outbox.
INSERT INTO {meta} (name, value) VALUES (:name, :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- create_aggregate_index: For an application's own queries.
CREATE INDEX {aggregate_index} ON {event} (aggregate_id, aggregate_version)

-- add: Write an event.
INSERT INTO {event} (id, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, key_hash,
    routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, available_at,
    next_attempt_at, status, max_attempts)
VALUES (:id, :stream, :tenant, :topic, :type, :aggregate_type, :aggregate_id, :aggregate_version, :key, :key_hash,
    :routing_key, :payload, :content_type, :headers, :schema_id, :schema_version, :occurred_at, :available_at,
    :next_attempt_at, :status, :max_attempts)

-- announce: Note how and to where a stream is served.
INSERT INTO {stream} (name, mode, destination) VALUES (:stream, :mode, :destination)
ON CONFLICT (name) DO UPDATE SET mode = excluded.mode, destination = excluded.destination

-- announce_shard: Make a shard's lease if it is missing.
INSERT INTO {lease} (stream, shard) VALUES (:stream, :shard) ON CONFLICT DO NOTHING

-- give: Release a shard cleanly.
UPDATE {lease} SET owner = NULL, lease_until = NULL, suspect = NULL, alone = 0
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker

-- note_suspect: Note the event that is about to be published, and how often it was published alone.
UPDATE {lease} SET suspect = :suspect, alone = :alone
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker

-- set_crashes: Correct the count of crashes and forget the suspect.
UPDATE {lease} SET suspect = NULL, alone = 0, crashes = :crashes
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker

-- forget_batches: No batch counts as settled any more.
UPDATE {lease} SET settled_batch = NULL

-- settled_batch: The batch that a shard settled last, if it is ours; nobody takes it over until the transaction ends.
SELECT settled_batch FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker
FOR UPDATE

-- last_batch: The batch that a shard settled last, if it is ours.
SELECT settled_batch FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker

-- note_batch: Note the batch that is settled, if the shard is ours and settled the one before, or this one already;
-- nobody takes it over until the transaction ends.
UPDATE {lease} SET settled_batch = :batch
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker
    AND (settled_batch IN (:before, :batch) OR settled_batch IS NULL AND :before IS NULL)

-- held_keys: The keys of a shard that are held.
SELECT h.key FROM {held_key} AS h WHERE h.stream = :stream AND h.shard = :shard

-- read_key: The failed and held events of a key in order, if the shard is ours.
SELECT id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, routing_key,
    CASE WHEN length(payload) <= :inline THEN payload END AS payload, content_type, schema_id, schema_version,
    created_at, attempts, max_attempts, occurred_at, headers, available_at,
    CASE WHEN length(payload) > :inline THEN length(payload) END AS bytes, status
FROM {event} WHERE stream = :stream AND shard = :shard AND key = :key AND status IN ('failed', 'held') AND EXISTS (
    SELECT 1 FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker)
ORDER BY seq LIMIT :limit

-- release_key: Release a key if nothing of it is failed or held.
DELETE FROM {held_key} WHERE stream = :stream AND shard = :shard AND key = :key AND mode = 'retrying' AND NOT EXISTS (
    SELECT 1 FROM {event} WHERE stream = :stream AND shard = :shard AND key = :key AND status IN ('failed', 'held'))

-- forget_dead: An id that died before and was written again has one dead letter, the new one.
DELETE FROM {dead_letter} WHERE id = :id AND stream = :stream AND consumer = ''
    AND EXISTS (SELECT 1 FROM {event} WHERE id = :id AND stream = :stream AND status <> 'published')

-- move_to_dead: An event becomes a dead letter.
INSERT INTO {dead_letter} (id, seq, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key,
    key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, attempts, error, errors)
SELECT id, seq, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key,
    key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, :attempts, :error,
    CASE WHEN length(errors) > 16000 THEN errors ELSE coalesce(errors, '') || :line END
FROM {event} WHERE id = :id AND stream = :stream AND status <> 'published'

-- remove_dead: Remove a dead letter that was replayed or discarded.
DELETE FROM {dead_letter} WHERE id = :id AND stream = :stream AND consumer = :consumer

-- revive: A dead letter becomes an event again, in its old place.
INSERT INTO {event} (id, seq, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`,
    key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, status, last_error, last_error_at, errors)
SELECT id, seq, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`,
    key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, :status, error, died_at, errors
FROM {dead_letter} WHERE id = :id AND stream = :stream AND consumer = ''

-- reenter: An event becomes pending at the end of its stream: REPLACE deletes its row and inserts it with a new seq.
-- PostgreSQL, which has no REPLACE, says it in its own way.
REPLACE INTO {event} (id, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`, key_hash,
    routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at, available_at,
    attempts, max_attempts, last_error, last_error_at, errors, status)
SELECT id, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`, key_hash,
    routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at, available_at,
    attempts, max_attempts, last_error, last_error_at, errors, 'pending'
FROM {event} WHERE id = :id AND stream = :stream

-- pause: Pause a stream, or resume it.
INSERT INTO {stream} (name, paused) VALUES (:stream, :paused) ON CONFLICT (name) DO UPDATE SET paused = excluded.paused

-- audit: Note what an operator did.
INSERT INTO {audit} (operator, action, stream, event_id, consumer)
VALUES (:operator, :action, :stream, :event_id, :consumer)

-- audited: The actions of operators. The code adds WHERE, ORDER BY and LIMIT.
SELECT at, operator, action, stream, event_id, consumer FROM {audit}

-- count: The events of a stream by status.
SELECT status, count(*) FROM {event} WHERE stream = :stream GROUP BY status

-- count_dead: The dead letters of a stream.
SELECT count(*) FROM {dead_letter} WHERE stream = :stream AND consumer = ''

-- known_streams: The streams that were ever served or paused.
SELECT name, paused, mode, destination FROM {stream}

-- workers: The workers that have not left, with when they were seen and until when that counts, and their circuits.
SELECT stream, name, seen_at, seen_until, circuit_error, circuit_at, version FROM {worker}

-- owners: The owners of shards, with when the last of their leases runs out.
SELECT stream, owner, count(*), max(lease_until) FROM {lease} WHERE owner IS NOT NULL GROUP BY stream, owner

-- held_key_events: The first failed or held event of a key, and how many there are up to :limit.
SELECT (SELECT id FROM {event} WHERE stream = :stream AND shard = :shard AND key = :key
        AND status IN ('failed', 'held') ORDER BY seq LIMIT 1),
    (SELECT count(*) FROM (SELECT 1 FROM {event} WHERE stream = :stream AND shard = :shard AND key = :key
        AND status IN ('failed', 'held') ORDER BY seq LIMIT :limit) AS part)

-- stuck_keys: Held keys of a stream.
SELECT shard, key, mode, next_attempt_at, dead_head FROM {held_key}
WHERE stream = :stream ORDER BY shard, key LIMIT :limit

-- stuck_key: One held key.
SELECT shard, key, mode, next_attempt_at, dead_head FROM {held_key}
WHERE stream = :stream AND shard = :shard AND key = :key

-- before: Pending events of a shard before a seq, counted up to :limit.
SELECT count(*) FROM (SELECT 1 FROM {event} WHERE stream = :stream AND shard = :shard AND status = 'pending'
    AND seq < :seq ORDER BY seq LIMIT :limit) AS part

-- owner: The owner of a shard.
SELECT owner, lease_until FROM {lease} WHERE stream = :stream AND shard = :shard

-- next_waiting: The first stream after a given name that has events to publish: one step into each index.
SELECT min(stream) FROM (
    SELECT min(stream) AS stream FROM {event} WHERE status = 'pending' AND stream > :after
    UNION ALL SELECT min(stream) FROM {event} WHERE next_attempt_at IS NOT NULL AND stream > :after
    UNION ALL SELECT min(stream) FROM {held_key} WHERE stream > :after) AS following

-- find_events: Events with all that is known of them; payload and errors only if asked for. The code adds WHERE, ORDER
-- BY and LIMIT.
SELECT e.id, e.seq, e.tenant, e.topic, e.type, e.aggregate_type, e.aggregate_id, e.aggregate_version, e.key,
    e.routing_key, CASE WHEN :whole THEN e.payload END AS payload, e.content_type, e.schema_id, e.schema_version,
    e.created_at, e.attempts, e.max_attempts, e.occurred_at, e.headers, e.available_at, e.stream, e.status,
    length(e.payload), e.next_attempt_at, e.published_at, e.processing_started_at, e.lease_owner, e.lease_until,
    e.lease_token, e.last_error, e.last_error_at, CASE WHEN :whole THEN e.errors END, 0, '', NULL
FROM {event} AS e

-- find_dead_letters: The same for dead letters; holds_key says whether the letter's key waits for it.
SELECT e.id, e.seq, e.tenant, e.topic, e.type, e.aggregate_type, e.aggregate_id, e.aggregate_version, e.key,
    e.routing_key, CASE WHEN :whole THEN e.payload END AS payload, e.content_type, e.schema_id, e.schema_version,
    e.created_at, e.attempts, e.max_attempts, e.occurred_at, e.headers, e.available_at, e.stream, 'dead',
    length(e.payload), NULL, NULL, NULL, NULL, NULL, 0, e.error, e.died_at, CASE WHEN :whole THEN e.errors END,
    (SELECT count(*) FROM {held_key} AS h
        WHERE h.stream = e.stream AND h.shard = e.shard AND h.key = e.key AND h.dead_head = e.id
        AND e.consumer = '') AS holds_key, e.consumer, e.replay_at
FROM {dead_letter} AS e

-- count_as_applied: An event counts as applied in a consumer's inbox; no row is changed if it does already.
INSERT INTO {inbox} (consumer, event_id, aggregate_id, aggregate_version, dead)
VALUES (:consumer, :id, :aggregate_id, :aggregate_version, :dead) ON CONFLICT DO NOTHING

-- count_as_new: An event does not count as applied any more.
DELETE FROM {inbox} WHERE consumer = :consumer AND event_id = :id

-- bury: Write the dead letter of a consumer.
INSERT INTO {dead_letter} (id, stream, consumer, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version,
    `key`, key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, attempts, error, errors)
VALUES (:id, :stream, :consumer, :tenant, :topic, :type, :aggregate_type, :aggregate_id, :aggregate_version,
    :key, :key_hash, :routing_key, :payload, :content_type, :headers, :schema_id, :schema_version, :occurred_at,
    :created_at, :available_at, :max_attempts, :attempts, :error, :errors)

-- finish_replay: Delete the dead letter of a replay that succeeded, if the lease still counts.
DELETE FROM {dead_letter} WHERE id = :id AND stream = :stream AND consumer = :consumer AND lease_token = :token

-- leave_consumer: Remove a process of a consumer.
DELETE FROM {consumer} WHERE consumer = :consumer AND name = :worker

-- consumers: The processes of all consumers.
SELECT consumer, name, seen_at, seen_until, source, lanes, paused_lanes, held_keys, lag_events, lag_seconds,
    failed_lanes
FROM {consumer} ORDER BY consumer, name

-- count_dead_of: The dead letters of a consumer.
SELECT count(*) FROM {dead_letter} WHERE consumer = :consumer

-- dead_consumers: The dead letters of every consumer that has any.
SELECT consumer, count(*) FROM {dead_letter} WHERE consumer > '' GROUP BY consumer
