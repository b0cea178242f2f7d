"""Certificates for tests: an authority of their own, a server's and a client's."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certificates(NamedTuple):
    """Files in PEM format: an authority, and the certificates that it signed."""

    authority: Path
    server: Path
    client: Path  # with its key in the same file
    server_key: Path


def certificates(folder: Path, names: Sequence[str] = ("localhost",)) -> Certificates:
    """A new authority, and a server's certificate for 127.0.0.1 and these names."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _signed("authority", authority_key, "authority", authority_key, is_authority=True)
    files = Certificates(*(folder / f"{name}.pem" for name in ("authority", "server", "client", "server_key")))
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    for file, key_file in ((files.server, files.server_key), (files.client, files.client)):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(file.stem, key, "authority", authority_key, names=names)
        text = certificate.public_bytes(serialization.Encoding.PEM)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        if key_file == file:
            file.write_bytes(text + private)
        else:
            file.write_bytes(text)
            key_file.write_bytes(private)
    return files


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    names: Sequence[str] = (),
    is_authority: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    hosts = [x509.DNSName(each) for each in names]
    alternative = x509.SubjectAlternativeName([*hosts, x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(alternative, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
