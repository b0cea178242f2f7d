-- Each statement commits by itself, so each must be safe to run again after an interrupted migration.
CREATE TABLE IF NOT EXISTS {meta} (
    name varchar(100) PRIMARY KEY,
    value text NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

-- There are no partial indexes, so every index holds every row; a settle changes ready alone. held_hash is NULL unless the
-- event is failed or held, so that a key with a long history is read from its first waiting event. The checks refuse, in
-- its own transaction, a row that no relay could read or settle.
CREATE TABLE IF NOT EXISTS {event} (
    seq bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
    created_at datetime(6) NOT NULL DEFAULT (utc_timestamp(6)),
    occurred_at datetime(6),
    available_at datetime(6),
    next_attempt_at datetime(6),
    published_at datetime(6),
    processing_started_at datetime(6),
    lease_until datetime(6),
    lease_token bigint NOT NULL DEFAULT 0,
    aggregate_version bigint,
    last_error_at datetime(6),
    id binary(16) NOT NULL,
    key_hash int NOT NULL CHECK (key_hash >= 0),
    attempts int NOT NULL DEFAULT 0,
    max_attempts int,
    shard smallint GENERATED ALWAYS AS (key_hash % {shards}) STORED,
    suspect tinyint NOT NULL DEFAULT 0,
    status enum('pending', 'published', 'failed', 'held', 'scheduled', 'processing') NOT NULL,
    stream varchar(100) NOT NULL,
    tenant varchar(100) NOT NULL,
    topic varchar(249) NOT NULL,
    type varchar(255) NOT NULL,
    aggregate_type varchar(255),
    aggregate_id varchar(255),
    `key` varchar(255),
    routing_key varchar(255),
    content_type varchar(255) NOT NULL,
    schema_id varchar(255),
    schema_version varchar(100),
    headers longtext,
    lease_owner varchar(255),
    last_error longtext,
    errors longtext,
    payload longblob NOT NULL,
    held_hash int GENERATED ALWAYS AS (CASE WHEN status IN ('failed', 'held') THEN key_hash END) VIRTUAL,
    UNIQUE KEY by_id (id, stream),
    KEY {ready_index} (status, stream, shard, seq),
    KEY {held_index} (held_hash, stream, seq),
    KEY {due_index} (stream, next_attempt_at),
    CHECK (attempts >= 0),
    CHECK (headers LIKE '{{%}}')
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

CREATE TABLE IF NOT EXISTS {stream} (
    name varchar(100) PRIMARY KEY,
    paused tinyint NOT NULL DEFAULT 0,
    mode varchar(10),
    destination longtext,
    created_at datetime(6) NOT NULL DEFAULT (utc_timestamp(6))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

CREATE TABLE IF NOT EXISTS {worker} (
    stream varchar(100) NOT NULL,
    name varchar(255) NOT NULL,
    seen_at datetime(6) NOT NULL,
    seen_until datetime(6) NOT NULL,
    circuit_at datetime(6),
    circuit_error longtext,
    version varchar(100),
    PRIMARY KEY (stream, name)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

CREATE TABLE IF NOT EXISTS {lease} (
    stream varchar(100) NOT NULL,
    shard smallint NOT NULL,
    owner varchar(255),
    token bigint NOT NULL DEFAULT 0,
    lease_until datetime(6),
    crashes int NOT NULL DEFAULT 0,
    suspect binary(16),
    alone int NOT NULL DEFAULT 0,
    settled_batch binary(16),
    PRIMARY KEY (stream, shard)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

CREATE TABLE IF NOT EXISTS {held_key} (
    stream varchar(100) NOT NULL,
    shard smallint NOT NULL,
    `key` varchar(255) NOT NULL,
    mode varchar(10) NOT NULL,
    next_attempt_at datetime(6),
    dead_head binary(16),
    PRIMARY KEY (stream, shard, `key`),
    KEY {held_due_index} (stream, shard, next_attempt_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

-- consumer is empty for a dead letter of a relay. A relay's dead letter has the seq of its event, and one of a consumer
-- takes the next number. replay_at and the lease belong to consumers: a relay's replay deletes the row.
CREATE TABLE IF NOT EXISTS {dead_letter} (
    seq bigint NOT NULL AUTO_INCREMENT,
    created_at datetime(6) NOT NULL,
    occurred_at datetime(6),
    available_at datetime(6),
    died_at datetime(6) NOT NULL DEFAULT (utc_timestamp(6)),
    replay_at datetime(6),
    lease_until datetime(6),
    lease_token bigint NOT NULL DEFAULT 0,
    aggregate_version bigint,
    id binary(16) NOT NULL,
    key_hash int NOT NULL,
    attempts int NOT NULL,
    max_attempts int,
    shard smallint GENERATED ALWAYS AS (key_hash % {shards}) STORED,
    stream varchar(100) NOT NULL,
    tenant varchar(100) NOT NULL,
    topic varchar(249) NOT NULL,
    type varchar(255) NOT NULL,
    aggregate_type varchar(255),
    aggregate_id varchar(255),
    `key` varchar(255),
    routing_key varchar(255),
    content_type varchar(255) NOT NULL,
    schema_id varchar(255),
    schema_version varchar(100),
    headers longtext,
    lease_owner varchar(255),
    error longtext NOT NULL,
    errors longtext,
    payload longblob NOT NULL,
    consumer varchar(100) NOT NULL DEFAULT '',
    PRIMARY KEY (id, stream, consumer),
    KEY {dead_index} (consumer, stream, died_at),
    KEY {replay_index} (consumer, replay_at),
    KEY by_death (died_at),
    KEY by_seq (seq)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

CREATE TABLE IF NOT EXISTS {audit} (
    id bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at datetime(6) NOT NULL DEFAULT (utc_timestamp(6)),
    operator varchar(255) NOT NULL,
    action varchar(100) NOT NULL,
    stream varchar(100) NOT NULL,
    event_id binary(16),
    consumer varchar(100) NOT NULL DEFAULT ''
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

-- A process of a consumer, with what it tells of itself.
CREATE TABLE IF NOT EXISTS {consumer} (
    consumer varchar(100) NOT NULL,
    name varchar(255) NOT NULL,
    seen_at datetime(6) NOT NULL,
    seen_until datetime(6) NOT NULL,
    source varchar(255) NOT NULL,
    lanes int NOT NULL,
    paused_lanes int NOT NULL,
    held_keys int NOT NULL,
    lag_events bigint,
    lag_seconds double,
    failed_lanes text NOT NULL,
    PRIMARY KEY (consumer, name)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

-- copies counts the copies that were refused: an update that changes nothing cannot be told from an insert by clients
-- with CLIENT_FOUND_ROWS.
CREATE TABLE IF NOT EXISTS {inbox} (
    consumer varchar(100) NOT NULL,
    event_id binary(16) NOT NULL,
    processed_at datetime(6) NOT NULL DEFAULT (utc_timestamp(6)),
    aggregate_id varchar(255),
    aggregate_version bigint,
    dead tinyint NOT NULL DEFAULT 0,
    copies int NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, event_id),
    KEY {inbox_age_index} (processed_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

-- aggregate is the SHA-256 of its type and id, name shows both to people. A row without a version is locked and not yet
-- written.
CREATE TABLE IF NOT EXISTS {inbox_version} (
    consumer varchar(100) NOT NULL,
    aggregate binary(32) NOT NULL,
    version bigint,
    event_id binary(16),
    name longtext NOT NULL,
    PRIMARY KEY (consumer, aggregate)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

-- id is the SHA-256 of scope and key. status, headers and body are those of the answer.
CREATE TABLE IF NOT EXISTS {idempotency} (
    id binary(32) PRIMARY KEY,
    fingerprint binary(32) NOT NULL,
    created_at datetime(6) NOT NULL DEFAULT (utc_timestamp(6)),
    status smallint,
    headers longtext,
    body longblob,
    KEY {idempotency_age_index} (created_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}

-- For writers that lock their keys: there is no lock of a name that ends with the transaction. As many rows as writers
-- are ever likely to be at work at once; two keys that share one only wait a little longer.
CREATE TABLE IF NOT EXISTS {key_lock} (
    bucket smallint PRIMARY KEY
) ENGINE = InnoDB

INSERT IGNORE INTO {key_lock} (bucket)
    WITH RECURSIVE number (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n < 511) SELECT n FROM number
