"""A certificate authority of the tests' own, made with the program openssl."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Authority:
    """It signs certificates; `file` is what a client trusts."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "ca.pem"

    def server(self, name: str, host: str = "localhost", expired: bool = False) -> ssl.SSLContext:
        """The TLS context of a server with a certificate for `host`."""
        key, request, certificate = (self.folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        _openssl("req", "-new", *CURVE, "-keyout", str(key), "-out", str(request), "-subj", f"/CN={host}")
        extension = self.folder / f"{name}.ext"
        extension.write_text(f"subjectAltName=DNS:{host}\n")
        if expired:
            _sign_expired(self.folder, request, certificate, extension)
        else:
            signer = (
                "-CA",
                str(self.file),
                "-CAkey",
                str(self.folder / "ca.key"),
                "-CAcreateserial",
                "-days",
                "30",
            )
            names = ("-in", str(request), "-out", str(certificate), "-extfile", str(extension))
            _openssl("x509", "-req", *names, *signer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context


def make_authority(folder: Path) -> Authority:
    """A new authority in the folder."""
    if shutil.which("openssl") is None:
        pytest.fail("The tests of TLS need the program openssl: install it.", pytrace=False)
    _openssl("req", "-x509", *CURVE, "-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.pem"), "-days", "30",
             "-subj", "/CN=Tests", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    return Authority(folder)


def _sign_expired(folder: Path, request: Path, certificate: Path, extension: Path) -> None:
    """`openssl ca` alone takes the dates of a certificate in OpenSSL 3.0."""
    (folder / "index.txt").write_text("")
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=own\n[own]\ndatabase={folder}/index.txt\nnew_certs_dir={folder}\nrand_serial=yes\n"
        "default_md=sha256\npolicy=any\n[any]\ncommonName=supplied\n"
    )
    _openssl("ca", "-batch", "-notext", "-config", str(folder / "ca.cnf"), "-in", str(request),
             "-out", str(certificate), "-cert", str(folder / "ca.pem"), "-keyfile", str(folder / "ca.key"),
             "-extfile", str(extension), "-startdate", "20200101000000Z", "-enddate", "20210101000000Z")  # fmt: skip


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
