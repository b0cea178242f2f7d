"""A transactional outbox: events written with your data, published at least once and in order per key."""

__version__ = "0.1.0.dev0"
