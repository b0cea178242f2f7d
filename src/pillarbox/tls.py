"""TLS of clients that take a context, and the cause of a failed connection in a few words."""

import os
import ssl
from errno import errorcode
from typing import Final, TypeVar

from pillarbox.errors import ConfigError

TLS_OPTIONS: Final = ("cafile", "certfile", "keyfile")

C = TypeVar("C", bound=ssl.SSLContext)


def tls_context(kind: type[C], cafile: str, certfile: str, keyfile: str) -> C:
    """A context that checks the server's certificate and its name. cafile: the authorities to trust; default: the
    system's. Raises ConfigError for a file that cannot be read."""
    if keyfile and not certfile:
        raise ConfigError("keyfile= needs certfile=, the certificate that belongs to the key")
    context = kind(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if cafile:
            context.load_verify_locations(cafile)
        else:
            context.load_default_certs()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cafile={cafile!r} cannot be read ({reason_of(error)}); name a file in PEM format"
        ) from error
    if certfile:
        try:
            context.load_cert_chain(certfile, keyfile or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"certfile={certfile!r} or keyfile={keyfile!r} cannot be read ({reason_of(error)}); "
                "name files in PEM format that belong together"
            ) from error
    return context


def reason_of(error: BaseException) -> str:
    """The cause in a few words, without payloads and secrets."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message or "certificate verify failed"
    if isinstance(error, ssl.SSLError):
        return getattr(error, "reason", None) or "TLS failed"
    # Clients have errors with numbers of their own protocol.
    if isinstance(error, OSError) and error.errno is not None and error.errno in errorcode:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return ": ".join(str(each) for each in error.args) or type(error).__name__
