"""One small file per kind of handle: each writes events inside the caller's own transaction."""
