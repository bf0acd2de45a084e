"""TLS to the API server: the trusted authority and the client certificate."""

from __future__ import annotations

import logging
import ssl
import tempfile
from pathlib import Path

from stoker.engine.kubernetes.api.credentials import Identity, WatchedFile
from stoker.engine.kubernetes.api.errors import KubeUnavailable
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig

log = logging.getLogger(__name__)


class Tls:
    """Creates a new context only when the authority or the client certificate changed, because connections are reused
    within one context."""

    def __init__(self, config: KubeConfig) -> None:
        self._config = config
        self._ca_file = WatchedFile(config.ca_file) if config.ca_file is not None else None
        self._made: tuple[bytes, bytes, bytes] | None = None
        self._context: ssl.SSLContext | None = None
        self._reported: tuple[bytes, bytes, bytes] | None = None
        if config.insecure and config.server.startswith("https:"):
            log.warning(
                "the certificate of %s is not checked (insecure-skip-tls-verify): any host on the way can read and "
                "change the traffic",
                config.server,
            )

    def context(self, identity: Identity) -> ssl.SSLContext | None:
        """None if the server uses plain HTTP. While certificate and key do not match, because a program is replacing
        them, the last valid pair is used."""
        if not self._config.server.startswith("https:"):
            return None
        wanted = (self._authority(), identity.cert, identity.key)
        if self._context is not None and wanted in (self._made, self._reported):
            return self._context
        try:
            self._context = self._make(*wanted)
        except (ssl.SSLError, OSError, ValueError) as exc:
            if self._context is None:
                raise KubeUnavailable(
                    f"the certificates for {self._config.server} cannot be used: {_reason(exc)}",
                    hint="Check certificate-authority, client-certificate and client-key in the kubeconfig.",
                ) from exc
            self._reported = wanted
            log.warning("the new certificates for %s cannot be used: %s", self._config.server, _reason(exc))
            return self._context
        self._made, self._reported = wanted, None
        return self._context

    def _authority(self) -> bytes:
        if self._ca_file is None:
            return self._config.ca
        found = self._ca_file.read()
        if not found:
            raise KubeUnavailable(
                f"no certificate authority in {self._ca_file.path}: {self._ca_file.problem or 'it is empty'}",
                hint="The kubeconfig names this file: put it there.",
            )
        return found

    def _make(self, ca: bytes, cert: bytes, key: bytes) -> ssl.SSLContext:
        if self._config.insecure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif ca:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
        else:
            context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert:
            # The standard library takes a client certificate only from a file.
            with tempfile.TemporaryDirectory(prefix="stoker-tls-") as directory:
                path = Path(directory, "pair.pem")
                path.touch(mode=0o600)
                path.write_bytes(cert.rstrip() + b"\n" + key)
                context.load_cert_chain(path, password=b"")  # else OpenSSL would ask on the terminal
        return context


def _reason(exc: Exception) -> str:
    return getattr(exc, "reason", None) or type(exc).__name__
