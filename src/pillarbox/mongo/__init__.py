"""Documents and collections of an outbox on MongoDB, for the outbox and the store."""
