"""The cluster's certificate authority, its certificates, and kubeconfigs with them."""

from __future__ import annotations

import base64
from pathlib import Path

import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from harness.layout import Layout

__all__ = ["Authority"]


class Authority:
    """Issues the certificates of one cluster's processes; keeps its files in `layout.pki`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ca = trustme.CA(organization_name="stoker test cluster")
        layout.pki.mkdir(parents=True, exist_ok=True)
        self._ca.cert_pem.write_to_path(self.path("ca.crt"))

    def path(self, name: str) -> Path:
        return self._layout.pki / name

    def issue(self, name: str, *identities: str, user: str, group: str | None = None) -> None:
        """Issue NAME.crt and NAME.key, for a server at `identities` and a client `user` in `group`."""
        issued = self._ca.issue_cert(*(identities or (name,)), common_name=user, organization_name=group)
        for number, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(self.path(f"{name}.crt"), append=number > 0)
        issued.private_key_pem.write_to_path(self.path(f"{name}.key"))

    def service_accounts(self) -> None:
        """The key that signs the tokens of service accounts."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.path("accounts.key").write_bytes(private)
        self.path("accounts.pub").write_bytes(public)

    def kubeconfig(self, name: str, *, user: str, group: str | None = None) -> Path:
        """A self-contained kubeconfig as `user` in `group`, beside the keys as NAME.kubeconfig."""
        self.issue(name, user=user, group=group)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": self._layout.server,
                        "certificate-authority-data": self._encoded("ca.crt"),
                    },
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": self._encoded(f"{name}.crt"),
                        "client-key-data": self._encoded(f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        path = self.path(f"{name}.kubeconfig")
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def _encoded(self, name: str) -> str:
        return base64.b64encode(self.path(name).read_bytes()).decode()
