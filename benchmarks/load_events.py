"""What the events of a backlog are like, on every database."""

SHARDS = 16
PAYLOAD_BYTES = 250
# Many, so that no key stands out; far fewer than events, so that most batches hold several of one.
KEYS = 50_000
HOT_KEY = "order-hot"

COLUMNS = "id, stream, tenant, topic, type, aggregate_type, aggregate_id, key, key_hash, payload, content_type, status"


def payload(number: int) -> bytes:
    """One of the right size."""
    return b'{"number":%d,"text":"' % number + b"x" * (PAYLOAD_BYTES - 21 - len(str(number))) + b'"}'
