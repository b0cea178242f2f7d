-- The statements of the store on MySQL and MariaDB. stores/sql/statements.sql has those that it shares with others.
--
-- Indexes are forced: the planner prefers the primary key, and a scan of it waits for rows that others have locked.
-- Instants are UTC_TIMESTAMP and not NOW, which follows the time zone of the session. An UPDATE assigns from left to
-- right, so that a column's old value is read before the column is set.

-- lock_migration: Keep other migrations of this outbox out. A change of the schema commits by itself here.
SELECT GET_LOCK(:name, :seconds)

-- unlock_migration: Let the next migration in.
SELECT RELEASE_LOCK(:name)

-- has_table: A row if there is such a table.
SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = :table

-- tables: The tables of the database.
SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE'

-- version: The version of the server.
SELECT version()

-- set_meta: Note a value of the outbox.
INSERT INTO {meta} (name, value) VALUES (:name, :value) ON DUPLICATE KEY UPDATE value = :value

-- has_aggregate_index: A row if events are indexed by their aggregate.
SELECT 1 FROM information_schema.statistics
WHERE table_schema = DATABASE() AND table_name = '{event}' AND index_name = '{aggregate_index}' LIMIT 1

-- add: Write an event.
INSERT INTO {event} (id, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`,
    key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, available_at,
    next_attempt_at, status, max_attempts)
VALUES (:id, :stream, :tenant, :topic, :type, :aggregate_type, :aggregate_id, :aggregate_version, :key,
    :key_hash, :routing_key, :payload, :content_type, :headers, :schema_id, :schema_version, :occurred_at,
    :available_at, :next_attempt_at, :status, :max_attempts)

-- announce: Note how and to where a stream is served.
INSERT INTO {stream} (name, mode, destination) VALUES (:stream, :mode, :destination)
ON DUPLICATE KEY UPDATE mode = :mode, destination = :destination

-- announce_shard: Make a shard's lease if it is missing.
INSERT INTO {lease} (stream, shard) VALUES (:stream, :shard) ON DUPLICATE KEY UPDATE shard = shard

-- join: Register a worker as live. The first error of an open circuit says since when it is open.
INSERT INTO {worker} (stream, name, seen_at, seen_until, version, circuit_error, circuit_at)
VALUES (:stream, :worker, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND, :version, :circuit_error,
    CASE WHEN :circuit_error IS NOT NULL THEN UTC_TIMESTAMP(6) END)
ON DUPLICATE KEY UPDATE seen_at = UTC_TIMESTAMP(6), seen_until = UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND,
    version = :version, circuit_error = :circuit_error,
    circuit_at = CASE WHEN :circuit_error IS NOT NULL THEN coalesce(circuit_at, UTC_TIMESTAMP(6)) END

-- leave: Remove a worker, and those that were last seen a day ago: their names are never used again.
DELETE FROM {worker}
WHERE stream = :stream AND (name = :worker OR seen_until < UTC_TIMESTAMP(6) - INTERVAL 1 DAY)

-- poll: The stream's workers and the work to do. LIMIT makes each lookup a single step into the index: without
-- it the planner may join all pending events.
SELECT 'paused', count(*) FROM {stream} WHERE name = :stream AND paused
UNION ALL SELECT 'live', count(*) FROM {worker} WHERE stream = :stream AND seen_until > UTC_TIMESTAMP(6)
UNION ALL SELECT 'rank', count(*) FROM {worker}
    WHERE stream = :stream AND seen_until > UTC_TIMESTAMP(6) AND name < :worker
UNION ALL SELECT 'free', count(*) FROM {lease}
    WHERE stream = :stream AND (owner IS NULL OR lease_until < UTC_TIMESTAMP(6))
UNION ALL SELECT 'scheduled', 1 WHERE EXISTS (SELECT 1 FROM {event} FORCE INDEX ({due_index})
    WHERE stream = :stream AND next_attempt_at <= UTC_TIMESTAMP(6) AND suspect = 0)
UNION ALL SELECT 'suspects', 1 WHERE EXISTS (SELECT 1 FROM {event} FORCE INDEX ({due_index})
    WHERE stream = :stream AND next_attempt_at <= UTC_TIMESTAMP(6) AND suspect > 0)
UNION ALL SELECT 'ready', l.shard FROM {lease} AS l WHERE l.stream = :stream AND l.shard IN :shards AND 1 = (
    SELECT 1 FROM {event} AS e FORCE INDEX ({ready_index})
    WHERE e.status = 'pending' AND e.stream = :stream AND e.shard = l.shard LIMIT 1)
UNION ALL SELECT 'due', l.shard FROM {lease} AS l WHERE l.stream = :stream AND l.shard IN :shards AND 1 = (
    SELECT 1 FROM {held_key} AS h FORCE INDEX ({held_due_index})
    WHERE h.stream = :stream AND h.shard = l.shard AND h.next_attempt_at <= UTC_TIMESTAMP(6) LIMIT 1)

-- takeable: Shards that nobody owns, or whose lease has run out; those that another takes now are passed over.
SELECT shard, owner FROM {lease} WHERE stream = :stream AND (owner IS NULL OR lease_until < UTC_TIMESTAMP(6))
ORDER BY shard LIMIT :limit FOR UPDATE SKIP LOCKED

-- take: Own shards. Each gets a new token, so that an earlier owner can change nothing any more.
UPDATE {lease} SET crashes = crashes + CASE WHEN owner IS NULL THEN 0 ELSE 1 END,
    owner = :worker, token = :token + shard, lease_until = UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND
WHERE stream = :stream AND shard IN :shards

-- taken: The leases as they are now.
SELECT shard, token, crashes, suspect, alone FROM {lease} WHERE stream = :stream AND shard IN :shards

-- renew_all: Extend all leases of a worker. Rows that a settle holds at this moment are passed over, so nothing can
-- deadlock and no settle waits. DISTINCT keeps the inner SELECT by itself: merged into the UPDATE it would wait.
UPDATE (SELECT DISTINCT shard FROM {lease} WHERE stream = :stream AND shard IN :shards AND token IN :tokens
    AND owner = :worker FOR UPDATE SKIP LOCKED) AS free STRAIGHT_JOIN {lease} AS l
ON l.stream = :stream AND l.shard = free.shard SET l.lease_until = UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND

-- renew: Extend one lease.
UPDATE {lease} SET lease_until = UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND
WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker

-- fence: A row if the shard is ours; nobody takes it over until the transaction ends.
SELECT 1 FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker
LOCK IN SHARE MODE

-- present: Those of these events that are in the outbox.
SELECT id FROM {event} FORCE INDEX (by_id) WHERE id IN :ids AND stream = :stream

-- busy: Workers whose lease of a shard runs, with when the last one runs out.
SELECT owner, max(lease_until) FROM {lease} WHERE owner IS NOT NULL AND lease_until >= UTC_TIMESTAMP(6) GROUP BY owner

-- read: Pending events of a shard in order, if the shard is ours. A payload of more than :inline bytes stays behind,
-- and the last column has its size.
SELECT id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`, routing_key,
    CASE WHEN length(payload) <= :inline THEN payload END AS payload, content_type, schema_id, schema_version,
    created_at, attempts, max_attempts, occurred_at, headers, available_at,
    CASE WHEN length(payload) > :inline THEN length(payload) END AS bytes
FROM {event} FORCE INDEX ({ready_index}) WHERE stream = :stream AND shard = :shard AND status = 'pending' AND EXISTS (
    SELECT 1 FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker)
    AND NOT EXISTS (SELECT 1 FROM {stream} WHERE name = :stream AND paused)
ORDER BY seq LIMIT :limit

-- read_joint: The same for several shards; the last column is the shard. The lease is compared by a scalar subquery: the
-- planner turns EXISTS into a join, which sorts all pending events.
SELECT e.id, e.seq, e.tenant, e.topic, e.type, e.aggregate_type, e.aggregate_id, e.aggregate_version, e.key,
    e.routing_key, CASE WHEN length(e.payload) <= :inline THEN e.payload END AS payload, e.content_type, e.schema_id,
    e.schema_version, e.created_at, e.attempts, e.max_attempts, e.occurred_at, e.headers, e.available_at,
    CASE WHEN length(e.payload) > :inline THEN length(e.payload) END AS bytes, e.shard
FROM {event} AS e FORCE INDEX ({ready_index})
WHERE e.stream = :stream AND e.shard IN :shards AND e.status = 'pending' AND 1 = (SELECT 1 FROM {lease} AS l
    WHERE l.stream = :stream AND l.shard = e.shard AND l.token IN :tokens AND l.owner = :worker)
    AND NOT EXISTS (SELECT 1 FROM {stream} WHERE name = :stream AND paused)
ORDER BY e.shard, e.seq LIMIT :limit

-- payloads: Payloads that stayed behind.
SELECT id, payload FROM {event} FORCE INDEX (by_id) WHERE id IN :ids AND stream = :stream

-- due_key: The held key of a shard whose time has come first.
SELECT `key`, mode, dead_head FROM {held_key}
WHERE stream = :stream AND shard = :shard AND next_attempt_at <= UTC_TIMESTAMP(6) ORDER BY next_attempt_at LIMIT 1

-- read_key: The failed and held events of a key in order, if the shard is ours. CRC32 is the number that a writer
-- stores as key_hash.
SELECT id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`, routing_key,
    CASE WHEN length(payload) <= :inline THEN payload END AS payload, content_type, schema_id, schema_version,
    created_at, attempts, max_attempts, occurred_at, headers, available_at,
    CASE WHEN length(payload) > :inline THEN length(payload) END AS bytes, status
FROM {event} FORCE INDEX ({held_index}) WHERE held_hash = CRC32(:key) & 2147483647 AND stream = :stream
    AND shard = :shard AND `key` = :key AND status IN ('failed', 'held') AND EXISTS (
    SELECT 1 FROM {lease} WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker)
ORDER BY seq LIMIT :limit

-- publish_fenced: Mark a batch as published if the shard is ours, in one packet: a relay that freezes between two
-- statements would keep the lease's row, and a take-over passes over a locked row.
BEGIN;
SET @pillarbox_ours = (SELECT count(*) FROM {lease}
    WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker LOCK IN SHARE MODE);
UPDATE {event} FORCE INDEX (by_id) SET status = 'published', published_at = UTC_TIMESTAMP(6),
    attempts = least(attempts, 2147483646) + 1
    WHERE id IN :ids AND stream = :stream AND status IN ('pending', 'failed', 'held') AND @pillarbox_ours = 1;
COMMIT;
SELECT @pillarbox_ours

-- delete_fenced: The same where nothing is kept.
BEGIN;
SET @pillarbox_ours = (SELECT count(*) FROM {lease}
    WHERE stream = :stream AND shard = :shard AND token = :token AND owner = :worker LOCK IN SHARE MODE);
DELETE {event} FROM {event} FORCE INDEX (by_id)
    WHERE id IN :ids AND stream = :stream AND status IN ('pending', 'failed', 'held') AND @pillarbox_ours = 1;
COMMIT;
SELECT @pillarbox_ours

-- publish_joint: Mark the events of several shards as published if all of these shards are ours, in one packet. The
-- leases are locked in the order of the primary key, which is that of their shards.
BEGIN;
SET @pillarbox_ours = (SELECT count(*) FROM {lease} FORCE INDEX (PRIMARY)
    WHERE stream = :stream AND shard IN :shards AND token IN :tokens AND owner = :worker LOCK IN SHARE MODE);
UPDATE {event} FORCE INDEX (by_id) SET status = 'published', published_at = UTC_TIMESTAMP(6),
    attempts = least(attempts, 2147483646) + 1
    WHERE id IN :ids AND stream = :stream AND status IN ('pending', 'failed', 'held') AND @pillarbox_ours = :count;
COMMIT;
SELECT @pillarbox_ours

-- delete_joint: The same where nothing is kept.
BEGIN;
SET @pillarbox_ours = (SELECT count(*) FROM {lease} FORCE INDEX (PRIMARY)
    WHERE stream = :stream AND shard IN :shards AND token IN :tokens AND owner = :worker LOCK IN SHARE MODE);
DELETE {event} FROM {event} FORCE INDEX (by_id)
    WHERE id IN :ids AND stream = :stream AND status IN ('pending', 'failed', 'held') AND @pillarbox_ours = :count;
COMMIT;
SELECT @pillarbox_ours

-- publish: Mark events as published. The status is checked, so that a settle can be repeated.
UPDATE {event} FORCE INDEX (by_id) SET status = 'published', published_at = UTC_TIMESTAMP(6),
    attempts = least(attempts, 2147483646) + 1
WHERE id IN :ids AND stream = :stream AND status IN ('pending', 'failed', 'held')

-- remove: Delete events that are dead letters now, or that need not be kept after they were published.
DELETE {event} FROM {event} FORCE INDEX (by_id) WHERE id IN :ids AND stream = :stream AND status <> 'published'

-- fail: An event failed, or its worker died (:suspect) and loses its lease. Errors are JSON lines; a long history stops
-- growing at its end, because the oldest errors are worth most.
UPDATE {event} SET errors = CASE WHEN status = 'failed' AND attempts = :attempts OR length(errors) > 16000 THEN errors
        ELSE concat(coalesce(errors, ''), :line) END,
    status = 'failed', attempts = :attempts, next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL :delay SECOND,
    last_error = :error, last_error_at = UTC_TIMESTAMP(6), suspect = :suspect,
    lease_owner = NULL, lease_until = NULL, lease_token = CASE WHEN :suspect > 0 THEN 0 ELSE lease_token END
WHERE id = :id AND stream = :stream AND status IN ('pending', 'failed', 'held', 'processing')

-- hold: Pending events wait behind their key.
UPDATE {event} FORCE INDEX (by_id) SET status = 'held' WHERE id IN :ids AND stream = :stream AND status = 'pending'

-- move_to_dead: An event becomes a dead letter.
INSERT INTO {dead_letter} (id, seq, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`,
    key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, attempts, error, errors)
SELECT id, seq, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`,
    key_hash, routing_key, payload, content_type, headers, schema_id, schema_version, occurred_at, created_at,
    available_at, max_attempts, :attempts, :error,
    CASE WHEN length(errors) > 16000 THEN errors ELSE concat(coalesce(errors, ''), :line) END
FROM {event} WHERE id = :id AND stream = :stream AND status <> 'published'

-- lock_keys: The modes of held keys. Locked first, so that later statements see what an operator decides now.
SELECT `key`, mode FROM {held_key} WHERE stream = :stream AND shard = :shard AND `key` IN :keys
ORDER BY `key` FOR UPDATE

-- hold_key: Hold a key, or change its mode.
INSERT INTO {held_key} (stream, shard, `key`, mode, next_attempt_at, dead_head)
VALUES (:stream, :shard, :key, :mode, UTC_TIMESTAMP(6) + INTERVAL :delay SECOND, :dead_head)
ON DUPLICATE KEY UPDATE
    mode = :mode, next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL :delay SECOND, dead_head = :dead_head

-- release_key: Release a key if nothing of it is failed or held.
DELETE FROM {held_key} WHERE stream = :stream AND shard = :shard AND `key` = :key AND mode = 'retrying'
    AND NOT EXISTS (SELECT 1 FROM {event} FORCE INDEX ({held_index}) WHERE held_hash = CRC32(:key) & 2147483647
        AND stream = :stream AND shard = :shard AND `key` = :key AND status IN ('failed', 'held'))

-- free_key: An operator decided about an event: its key goes on, unless it waits for another one.
UPDATE {held_key} SET mode = 'retrying', next_attempt_at = UTC_TIMESTAMP(6), dead_head = NULL
WHERE stream = :stream AND shard = :shard AND `key` = :key AND (mode = 'retrying' OR dead_head = :id)

-- due: Events whose instant has come, earliest first.
SELECT id, status FROM {event} FORCE INDEX ({due_index}) WHERE stream = :stream AND next_attempt_at <= UTC_TIMESTAMP(6)
    AND status IN ('scheduled', 'failed') AND suspect = 0
ORDER BY next_attempt_at, seq LIMIT :limit FOR UPDATE SKIP LOCKED

-- return: Failed events become pending, in their old places.
UPDATE {event} FORCE INDEX (by_id) SET status = 'pending', next_attempt_at = NULL
WHERE id IN :ids AND stream = :stream AND status = 'failed'

-- ready: Pending events of a shard; those that others lease at this moment are passed over.
SELECT id FROM {event} FORCE INDEX ({ready_index}) WHERE stream = :stream AND shard = :shard AND status = 'pending'
ORDER BY seq LIMIT :limit FOR UPDATE SKIP LOCKED

-- suspects: One event that was in a crash.
SELECT id FROM {event} FORCE INDEX ({due_index})
WHERE stream = :stream AND next_attempt_at <= UTC_TIMESTAMP(6) AND status = 'failed' AND suspect > 0
ORDER BY next_attempt_at LIMIT 1 FOR UPDATE SKIP LOCKED

-- claim: Lease events, each charged an attempt.
UPDATE {event} FORCE INDEX (by_id) SET status = 'processing', attempts = least(attempts, 2147483646) + 1,
    next_attempt_at = NULL, lease_owner = :worker, lease_token = :token,
    lease_until = UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND,
    processing_started_at = UTC_TIMESTAMP(6)
WHERE id IN :ids AND stream = :stream

-- claimed: The events that were leased, with their tokens.
SELECT id, seq, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, `key`, routing_key, payload,
    content_type, schema_id, schema_version, created_at, attempts, max_attempts, occurred_at, headers,
    available_at, lease_token
FROM {event} FORCE INDEX (by_id) WHERE id IN :ids AND stream = :stream ORDER BY seq

-- renew_claim: Extend the lease of an event.
UPDATE {event} SET lease_until = UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND
WHERE id = :id AND stream = :stream AND status = 'processing' AND lease_token = :token

-- lock_claims: The tokens of leased events, locked: nobody rescues them until the transaction ends.
SELECT id, lease_token FROM {event} FORCE INDEX (by_id)
WHERE id IN :ids AND stream = :stream AND status = 'processing' ORDER BY id FOR UPDATE

-- publish_claims: Mark leased events as published.
UPDATE {event} FORCE INDEX (by_id) SET status = 'published', published_at = UTC_TIMESTAMP(6), lease_owner = NULL,
    lease_until = NULL, suspect = 0
WHERE id IN :ids AND stream = :stream

-- refund: Give leased events back uncharged. A suspect stays one, because it did not run alone to the end.
UPDATE {event} FORCE INDEX (by_id) SET status = CASE WHEN suspect > 0 THEN 'failed' ELSE 'pending' END,
    next_attempt_at = CASE WHEN suspect > 0 THEN UTC_TIMESTAMP(6) END, attempts = attempts - 1,
    lease_owner = NULL, lease_until = NULL
WHERE id IN :ids AND stream = :stream

-- stuck: Leased events whose worker died, or has held them for too long. They are few: the status finds them.
SELECT id, attempts, suspect FROM {event} FORCE INDEX ({ready_index})
WHERE stream = :stream AND status = 'processing'
    AND (lease_until < UTC_TIMESTAMP(6) OR processing_started_at < UTC_TIMESTAMP(6) - INTERVAL :stuck SECOND)
ORDER BY lease_until LIMIT :limit FOR UPDATE SKIP LOCKED

-- prune_page: Events in order of seq: whether each can go, and whether it is old. What is young ends the walk.
SELECT seq, status = 'published' AND published_at < UTC_TIMESTAMP(6) - INTERVAL :keep SECOND,
    created_at < UTC_TIMESTAMP(6) - INTERVAL :keep SECOND
FROM {event} WHERE seq > :after ORDER BY seq LIMIT :limit

-- prune: Delete events that can go. Checked again, because an operator may have replayed one meanwhile.
DELETE FROM {event}
WHERE seq IN :seqs AND status = 'published' AND published_at < UTC_TIMESTAMP(6) - INTERVAL :keep SECOND

-- prune_dead: Delete old dead letters, but none that an operator needs to free a blocked or parked key, and none that a
-- consumer shall apply again.
DELETE FROM {dead_letter} WHERE died_at < UTC_TIMESTAMP(6) - INTERVAL :keep SECOND AND replay_at IS NULL AND NOT EXISTS (
    SELECT 1 FROM {held_key} AS h WHERE h.stream = {dead_letter}.stream AND h.shard = {dead_letter}.shard
    AND h.key = {dead_letter}.key AND h.mode IN ('blocked', 'parked') AND {dead_letter}.consumer = '')
ORDER BY died_at LIMIT :limit

-- prune_inbox: Forget events that were processed long ago.
DELETE FROM {inbox} WHERE processed_at < UTC_TIMESTAMP(6) - INTERVAL :keep SECOND ORDER BY processed_at LIMIT :limit

-- prune_idempotency: Delete old idempotency keys with their answers.
DELETE FROM {idempotency} WHERE created_at < UTC_TIMESTAMP(6) - INTERVAL :keep SECOND ORDER BY created_at LIMIT :limit

-- clock: The database's time.
SELECT UTC_TIMESTAMP(6)

-- pause: Pause a stream, or resume it.
INSERT INTO {stream} (name, paused) VALUES (:stream, :paused) ON DUPLICATE KEY UPDATE paused = :paused

-- lock_dead: Dead letters of a stream, locked in the order in which everybody locks them.
SELECT id, shard, `key`, seq FROM {dead_letter} WHERE id IN :ids AND stream = :stream AND consumer = :consumer
ORDER BY shard, `key`, seq FOR UPDATE

-- next_waiting: The first stream after a given name that has events to publish: one step into each index.
SELECT min(name) FROM (
    (SELECT min(stream) AS name FROM {event} FORCE INDEX ({ready_index}) WHERE status = 'pending' AND stream > :after)
    UNION ALL (SELECT min(stream) FROM {event} FORCE INDEX ({ready_index})
        WHERE status = 'scheduled' AND stream > :after)
    UNION ALL (SELECT min(stream) FROM {event} FORCE INDEX ({ready_index}) WHERE status = 'failed' AND stream > :after)
    UNION ALL (SELECT min(stream) FROM {held_key} WHERE stream > :after)) AS following

-- is_one_of: A condition for find_events and find_dead_letters.
e.id IN :ids

-- live_workers: The live workers of each stream.
SELECT stream, count(*) FROM {worker} WHERE seen_until > UTC_TIMESTAMP(6) GROUP BY stream

-- gauges: A stream's events by state, each counted up to :limit in the index that has them, with the oldest instant
-- since when one waits. The oldest of a state is the first of a shard; the index has it first, and ORDER BY would sort
-- all events of the shard. Modes are counted without GROUP BY, whose temporary table costs more than all the rest.
WITH RECURSIVE number (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n < :last_shard),
first (since) AS (
    SELECT (SELECT coalesce(available_at, created_at) FROM {event} FORCE INDEX ({ready_index})
        WHERE status = 'pending' AND stream = :stream AND shard = n LIMIT 1) FROM number
    UNION ALL SELECT (SELECT coalesce(available_at, created_at) FROM {event} FORCE INDEX ({ready_index})
        WHERE status = 'failed' AND stream = :stream AND shard = n LIMIT 1) FROM number
    UNION ALL SELECT (SELECT coalesce(available_at, created_at) FROM {event} FORCE INDEX ({ready_index})
        WHERE status = 'held' AND stream = :stream AND shard = n LIMIT 1) FROM number
    UNION ALL SELECT (SELECT coalesce(available_at, created_at) FROM {event} FORCE INDEX ({ready_index})
        WHERE status = 'processing' AND stream = :stream AND shard = n LIMIT 1) FROM number)
SELECT 'first', 'pending', 0, min(since) FROM first
UNION ALL SELECT 'ready', 'pending', count(*), NULL FROM (SELECT 1 FROM {event} FORCE INDEX ({ready_index})
    WHERE status = 'pending' AND stream = :stream LIMIT :limit) AS part
UNION ALL SELECT 'failed', 'failed', count(*), NULL FROM (SELECT 1 FROM {event} FORCE INDEX ({ready_index})
    WHERE status = 'failed' AND stream = :stream LIMIT :limit) AS part
UNION ALL SELECT 'held', 'held', count(*), NULL FROM (SELECT 1 FROM {event} FORCE INDEX ({ready_index})
    WHERE status = 'held' AND stream = :stream LIMIT :limit) AS part
UNION ALL SELECT 'processing', 'processing', count(*), NULL FROM (SELECT 1 FROM {event} FORCE INDEX ({ready_index})
    WHERE status = 'processing' AND stream = :stream LIMIT :limit) AS part
UNION ALL SELECT 'scheduled', 'scheduled', count(*), NULL FROM (SELECT 1 FROM {event} FORCE INDEX ({ready_index})
    WHERE status = 'scheduled' AND stream = :stream LIMIT :limit) AS part
UNION ALL SELECT 'dead', 'dead', count(*), NULL FROM (SELECT 1 FROM {dead_letter} FORCE INDEX ({dead_index})
    WHERE consumer = '' AND stream = :stream LIMIT :limit) AS part
UNION ALL SELECT 'keys', name, CASE name WHEN 'retrying' THEN retrying WHEN 'blocked' THEN blocked ELSE parked END, NULL
    FROM (SELECT count(nullif(mode = 'retrying', 0)) AS retrying, count(nullif(mode = 'blocked', 0)) AS blocked,
            count(nullif(mode = 'parked', 0)) AS parked
        FROM (SELECT mode FROM {held_key} WHERE stream = :stream LIMIT :limit) AS part) AS counted
    CROSS JOIN (SELECT 'retrying' AS name UNION ALL SELECT 'blocked' UNION ALL SELECT 'parked') AS modes

-- held_key_events: The first failed or held event of a key, and how many there are up to :limit.
SELECT (SELECT id FROM {event} FORCE INDEX ({held_index}) WHERE held_hash = CRC32(:key) & 2147483647
        AND stream = :stream AND `key` = :key AND status IN ('failed', 'held') ORDER BY seq LIMIT 1),
    (SELECT count(*) FROM (SELECT 1 FROM {event} FORCE INDEX ({held_index}) WHERE held_hash = CRC32(:key) & 2147483647
        AND stream = :stream AND `key` = :key AND status IN ('failed', 'held') LIMIT :limit) AS part)

-- stuck_keys: Held keys of a stream.
SELECT shard, `key`, mode, next_attempt_at, dead_head FROM {held_key}
WHERE stream = :stream ORDER BY shard, `key` LIMIT :limit

-- stuck_key: One held key.
SELECT shard, `key`, mode, next_attempt_at, dead_head FROM {held_key}
WHERE stream = :stream AND shard = :shard AND `key` = :key

-- before: Pending events of a shard before a seq, counted up to :limit.
SELECT count(*) FROM (SELECT 1 FROM {event} FORCE INDEX ({ready_index})
    WHERE status = 'pending' AND stream = :stream AND shard = :shard AND seq < :seq LIMIT :limit) AS part

-- lock_letter: The errors of a consumer's dead letter, locked: an operator who replays it now comes before or after.
SELECT errors FROM {dead_letter} WHERE id = :id AND stream = :stream AND consumer = :consumer FOR UPDATE

-- bury_again: A dead letter that was replayed has died again.
UPDATE {dead_letter} SET died_at = UTC_TIMESTAMP(6), attempts = :attempts, error = :error, errors = :errors,
    replay_at = NULL, lease_owner = NULL, lease_until = NULL, lease_token = 0
WHERE id = :id AND stream = :stream AND consumer = :consumer

-- order_replay: The consumer shall apply a dead letter again.
UPDATE {dead_letter} SET replay_at = UTC_TIMESTAMP(6)
WHERE id = :id AND stream = :stream AND consumer = :consumer

-- due_replays: Dead letters that a consumer shall apply again and that nobody has leased, in order of seq; those that
-- another process leases now are passed over.
SELECT e.id, e.seq, e.tenant, e.topic, e.type, e.aggregate_type, e.aggregate_id, e.aggregate_version, e.key,
    e.routing_key, e.payload, e.content_type, e.schema_id, e.schema_version, e.created_at, e.attempts, e.max_attempts,
    e.occurred_at, e.headers, e.available_at, e.stream, e.error
FROM {dead_letter} AS e WHERE e.consumer = :consumer AND e.replay_at <= UTC_TIMESTAMP(6)
    AND (e.lease_until IS NULL OR e.lease_until < UTC_TIMESTAMP(6))
ORDER BY e.seq LIMIT :limit FOR UPDATE SKIP LOCKED

-- lease_replays: Lease dead letters.
UPDATE {dead_letter} SET lease_owner = :worker, lease_token = :token,
    lease_until = UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND
WHERE id IN :ids AND consumer = :consumer AND replay_at IS NOT NULL

-- report: Register a process of a consumer as live, with what it tells of itself.
INSERT INTO {consumer} (consumer, name, seen_at, seen_until, source, lanes, paused_lanes, held_keys, lag_events,
    lag_seconds, failed_lanes)
VALUES (:consumer, :worker, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND,
    :source, :lanes, :paused_lanes, :held_keys, :lag_events, :lag_seconds, :failed_lanes)
ON DUPLICATE KEY UPDATE seen_at = UTC_TIMESTAMP(6), seen_until = UTC_TIMESTAMP(6) + INTERVAL :seconds SECOND, source = :source,
    lanes = :lanes, paused_lanes = :paused_lanes, held_keys = :held_keys, lag_events = :lag_events,
    lag_seconds = :lag_seconds, failed_lanes = :failed_lanes

-- count_as_applied: An event counts as applied in a consumer's inbox; more than one row is counted if it does already.
INSERT INTO {inbox} (consumer, event_id, aggregate_id, aggregate_version, dead)
VALUES (:consumer, :id, :aggregate_id, :aggregate_version, :dead) ON DUPLICATE KEY UPDATE copies = copies + 1

-- lock_published: Published events of a stream, locked in the order in which everybody locks events.
SELECT id, shard, `key`, seq FROM {event} FORCE INDEX (by_id) WHERE id IN :ids AND stream = :stream
    AND status = 'published' ORDER BY shard, `key`, seq FOR UPDATE

-- unpublish: A published event waits again, from now on.
UPDATE {event} SET status = 'failed', attempts = 0, published_at = NULL, suspect = 0, available_at = UTC_TIMESTAMP(6)
WHERE id = :id AND stream = :stream AND status = 'published'

-- settings: Settings of the server that matter to a relay.
SHOW GLOBAL VARIABLES WHERE Variable_name IN ('wait_timeout', 'innodb_lock_wait_timeout', 'max_connections',
    'innodb_flush_log_at_trx_commit')

-- open_connections: The connections of all users.
SHOW GLOBAL STATUS LIKE 'Threads_connected'

-- oldest_transaction: The age of the oldest transaction. InnoDB tells its start in the time zone of the machine, whatever
-- that of the session is.
SELECT max(timestampdiff(SECOND, trx_started, convert_tz(utc_timestamp(), '+00:00', 'SYSTEM'))) FROM information_schema.innodb_trx
