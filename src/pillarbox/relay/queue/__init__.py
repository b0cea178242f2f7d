"""Queue streams: a worker leases single events."""
