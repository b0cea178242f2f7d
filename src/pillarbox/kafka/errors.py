"""Errors of Kafka's client library."""

from confluent_kafka import KafkaException

from pillarbox.errors import ConfigError


def config_error(error: Exception) -> ConfigError:
    """The error for properties that the client library refuses."""
    reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
    return ConfigError(f"the Kafka client refuses its properties: {' '.join(reason.split())}; correct or remove it")
