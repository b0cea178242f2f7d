"""What is said about a connection that fails, without a server."""

import ssl

import pytest
from aiormq.exceptions import AMQPConnectionError, ChannelNotFoundEntity, ConnectionClosed

from pillarbox.amqp import _tls_error
from pillarbox.tls import reason_of


@pytest.mark.parametrize(
    ("error", "said"),
    [
        # Its number is RabbitMQ's, and not one of the operating system.
        (ConnectionClosed(320, "CONNECTION_FORCED - vhost 'shop' is deleted"), "CONNECTION_FORCED - vhost 'shop' is"),
        (ChannelNotFoundEntity("NOT_FOUND - no exchange 'shop'"), "NOT_FOUND - no exchange 'shop'"),
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 5672)"), "Connection refused"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "TLS failed"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_reason_is_in_the_words_of_who_gave_it(error: Exception, said: str) -> None:
    assert reason_of(error).startswith(said)


def test_a_client_certificate_that_is_refused_late_is_an_error_of_tls() -> None:
    """With TLS 1.3 the client takes the connection for open, and its library reads the refusal."""
    refused = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required")
    error = AMQPConnectionError(f"Server communication error: {refused!r}")
    error.__cause__ = refused
    assert _tls_error(error) is refused
    assert _tls_error(refused) is refused
    assert _tls_error(AMQPConnectionError("Server connection error")) is None
