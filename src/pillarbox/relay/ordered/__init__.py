"""Ordered streams: a worker owns shards and runs turns on them."""
