"""Certificates for tests, by openssl's command line."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

# The database of an authority, which `openssl ca` needs to revoke.
CONFIG = """\
[ca]
default_ca = here
[here]
database = {folder}/index.txt
certificate = {folder}/ca.pem
private_key = {folder}/ca.key
default_md = sha256
default_crl_days = 30
"""
# Others connect to an address of this host, whatever it is here.
HERE = f"DNS:{socket.gethostname()}"
NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def openssl(*words: object) -> None:
    """Runs it."""
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Authority:
    """Issues certificates; its files are in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.certificate = folder / "ca.pem"
        (folder / "index.txt").touch()
        (folder / "ca.cnf").write_text(CONFIG.format(folder=folder))
        openssl("req", "-x509", *NEW_KEY, "-days", 30, "-subj", f"/CN={folder.name}",
                "-keyout", folder / "ca.key", "-out", self.certificate)  # fmt: skip

    def issue(self, host: str, *, names: str = HERE, days: int = 30) -> dict[str, str]:
        """The variables of a rank with a certificate for these names."""
        key, request, certificate = (self.folder / f"{host}.{end}" for end in ("key", "csr", "pem"))
        extensions = self.folder / f"{host}.ext"
        extensions.write_text(f"subjectAltName = {names}\n")
        openssl("req", *NEW_KEY, "-subj", f"/CN={host}", "-keyout", key, "-out", request)
        openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey",
                self.folder / "ca.key", "-CAcreateserial", "-days", days, "-extfile", extensions,
                "-out", certificate)  # fmt: skip
        key.chmod(0o600)
        return variables_of(certificate, key, self.certificate)

    def revoke(self, variables: Mapping[str, str], to: Path) -> None:
        """Writes the authority with a list on which that certificate is."""
        config = ("ca", "-config", self.folder / "ca.cnf")
        openssl(*config, "-revoke", variables["TORCH_RESILIENT_TLS_CERT"])
        self.with_list(to)

    def with_list(self, to: Path) -> None:
        """Writes the authority with its list."""
        revoked = self.folder / "crl.pem"
        openssl("ca", "-config", self.folder / "ca.cnf", "-gencrl", "-out", revoked)
        # In one step: a rank may look at any time.
        new = to.with_suffix(".new")
        new.write_text(self.certificate.read_text() + revoked.read_text())
        new.rename(to)


def variables_of(certificate: object, key: object, authorities: object) -> dict[str, str]:
    """Those by which a rank gets these files."""
    return {
        "TORCH_RESILIENT_TLS_CERT": str(certificate),
        "TORCH_RESILIENT_TLS_KEY": str(key),
        "TORCH_RESILIENT_TLS_CA": str(authorities),
    }
