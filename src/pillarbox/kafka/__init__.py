"""What the publisher and the source share about Kafka: URLs, guarded client properties, errors of the client."""
