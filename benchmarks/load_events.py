"""The events of a backlog, on every database."""

SHARDS = 16
PAYLOAD_BYTES = 250
# Many keys, so that none stands out; far fewer than events, so that batches hold several events of a key.
KEYS = 50_000
HOT_KEY = "order-hot"

COLUMNS = "id, stream, tenant, topic, type, aggregate_type, aggregate_id, key, key_hash, payload, content_type, status"


def payload(number: int) -> bytes:
    """The payload of one event."""
    return b'{"number":%d,"text":"' % number + b"x" * (PAYLOAD_BYTES - 21 - len(str(number))) + b'"}'
