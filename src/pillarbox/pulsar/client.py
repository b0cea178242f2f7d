"""Pulsar's client, as its documentation shows it, made quiet and patient."""

import os
from collections.abc import Sequence
from typing import Any, Final

import pulsar

from pillarbox.errors import ConfigError
from pillarbox.pulsar.settings import Login

# An event that timed out could still be written later, as a copy and out of order.
_PATIENT: Final = {"send_timeout_millis": 0, "max_pending_messages": 0, "chunking_enabled": False}
# A producer without a given first number, which connects again before its first answer, uses numbers twice. A broker
# with deduplication drops the second message, and the client reports it as sent. The client ignores 0.
_FIRST_SEQUENCE_ID: Final = 1
_BATCH_BYTES: Final = 131_072
# The time in which a batch fills. A wave's last batches wait for it; a shorter one makes more and smaller batches.
_LINGER_MILLISECONDS: Final = 2

COMPRESSIONS: Final = {
    "none": pulsar.CompressionType.NONE,
    "lz4": pulsar.CompressionType.LZ4,
    "zlib": pulsar.CompressionType.ZLib,
    "zstd": pulsar.CompressionType.ZSTD,
    "snappy": pulsar.CompressionType.SNAPPY,
}
STARTS: Final = {"earliest": pulsar.InitialPosition.Earliest, "latest": pulsar.InitialPosition.Latest}
BATCHINGS: Final = {"key": pulsar.BatchingType.KeyBased, "plain": pulsar.BatchingType.Default}


def new_client(login: Login, timeout_seconds: float) -> Any:
    """A client that is not connected yet. timeout_seconds: the longest time of each question to the broker."""
    options: dict[str, Any] = {}
    if login.tls:
        options["tls_validate_hostname"] = login.tls_hostname
        if login.tls_ca:
            options["tls_trust_certs_file_path"] = login.tls_ca
    try:
        return pulsar.Client(
            f"{'pulsar+ssl' if login.tls else 'pulsar'}://{login.hosts}",
            authentication=_authentication(login),
            operation_timeout_seconds=max(1, round(timeout_seconds)),
            connection_timeout_ms=max(1, round(timeout_seconds * 1000)),
            stats_interval_in_seconds=0,
            # Its default logger prints. A logger of Python's can deadlock: the client logs under its own locks.
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
            **options,
        )
    except (pulsar.PulsarException, ValueError, RuntimeError) as error:
        raise ConfigError(f"the Pulsar client refuses its settings: {error}; correct them") from error


def new_producer(client: Any, topic: str, *, batching: str, compression: str, max_message_bytes: int) -> Any:
    """A producer for one partition; batching '': it sends each message alone, and knows at once if one is too big.

    Its name is unique, so that two relays never share their sequence numbers.
    """
    return client.create_producer(
        topic,
        batching_enabled=bool(batching),
        batching_type=BATCHINGS[batching or "plain"],
        batching_max_publish_delay_ms=_LINGER_MILLISECONDS,
        batching_max_allowed_size_in_bytes=min(_BATCH_BYTES, max_message_bytes // 2),
        compression_type=COMPRESSIONS[compression],
        initial_sequence_id=_FIRST_SEQUENCE_ID,
        **_PATIENT,
    )


def new_consumer(client: Any, topics: Sequence[str], subscription: str, *, start: str) -> Any:
    """A consumer of a Key_Shared subscription. It never gives a message back by itself: that would reorder its key."""
    return client.subscribe(
        topics[0] if len(topics) == 1 else list(topics),
        subscription,
        consumer_type=pulsar.ConsumerType.KeyShared,
        initial_position=STARTS[start],
        # With acknowledgements of parts of a batch the broker never hears that the rest of a redelivered batch is done:
        # as soon as its key moves to another consumer, it gives out nothing of that key any more.
        batch_index_ack_enabled=False,
    )


def _authentication(login: Login) -> Any:
    if login.token:
        return pulsar.AuthenticationToken(login.token)
    if login.token_file:
        return pulsar.AuthenticationToken(_TokenFile(login.token_file))
    if login.user:
        return pulsar.AuthenticationBasic(login.user, login.password)
    if login.tls_cert:
        return pulsar.AuthenticationTLS(login.tls_cert, login.tls_key)
    return None


class _TokenFile:
    """The token in a file, or its last one while the file cannot be read: an exception would stop the client."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._token = ""

    def __call__(self) -> str:
        try:
            with open(self._path) as file:
                self._token = file.read().strip()
        except (OSError, ValueError):
            return self._token
        return self._token
