"""Keys and certificates with which the server and an attempt's couriers authenticate each other."""

from __future__ import annotations

import base64
import datetime
import os
from collections.abc import Mapping
from typing import Any

from stoker.engine.kubernetes.manifests.pod import Keys
from stoker.task import courier_protocol

_BACK = datetime.timedelta(days=1)
_YEARS = datetime.timedelta(days=20 * 365)
"""The certificate is compared byte by byte and its dates are not used; clocks of nodes may be wrong."""


def make() -> Keys:
    """A key, and a self-signed certificate with its private key. Takes a moment: call it in a thread."""
    from cryptography import x509  # lazy: only needed by submit
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stoker-courier")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACK)
        .not_valid_after(now + _YEARS)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("stoker-courier")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    return Keys(
        courier=os.urandom(courier_protocol.KEY_BYTES),
        cert=certificate.public_bytes(serialization.Encoding.PEM),
        private=private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def read(secret: Mapping[str, Any]) -> tuple[bytes, str] | None:
    """The courier's key and certificate from an attempt's Secret; None if they are missing or damaged."""
    data = secret.get("data") or {}
    try:
        key = base64.b64decode(data["courier.key"], validate=True)
        certificate = base64.b64decode(data["tls.crt"], validate=True).decode()
    except (KeyError, ValueError):
        return None
    return (key, certificate) if len(key) == courier_protocol.KEY_BYTES else None
