"""What the publisher and the source for Pulsar share: settings and the client."""
