"""Who is at the other end of a connection: certificates of machines, and the authority of one's own that signs them.

Both ends show a certificate, and each takes only those that the same authority signed (mutual TLS). A machine has one
certificate, for what it serves and for what it asks; `issue` makes an authority and certificates for development and
for networks of one's own. Where an organisation has an authority, its files are named in their place.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError

AUTHORITY, CERTIFICATE, KEY = "ROLLOUT_TLS_CA", "ROLLOUT_TLS_CERTIFICATE", "ROLLOUT_TLS_KEY"
"""Environment variables with the paths of PEM files: the authority's certificate, this machine's, and its key."""
AUTHORITY_DAYS, MACHINE_DAYS = 3650, 365
EARLY_DAYS = 30
"""Before its end a machine's certificate is issued anew, and a server that has it warns."""
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


@dataclass(frozen=True)
class TLSFiles:
    """Paths of PEM files: of the authority's certificate, of this machine's and of its private key."""

    authority: str
    certificate: str
    key: str

    @classmethod
    def from_environment(cls) -> TLSFiles | None:
        """Those that the environment names; None where it names none. Raises ConfigError where it names only some."""
        found = {name: os.environ.get(name, "") for name in (AUTHORITY, CERTIFICATE, KEY)}
        if not any(found.values()):
            return None
        if missing := [name for name, path in found.items() if not path]:
            raise ConfigError(f"{', '.join(missing)} is not set; {AUTHORITY}, {CERTIFICATE} and {KEY} go together")
        return cls(*found.values())

    def server_options(self) -> dict[str, Any]:
        """uvicorn's settings of a server that answers only clients with a certificate of the authority. Raises
        ConfigError where the files are of no use."""
        self._loaded(ssl.PROTOCOL_TLS_SERVER)
        return {
            "ssl_certfile": self.certificate,
            "ssl_keyfile": self.key,
            "ssl_ca_certs": self.authority,
            "ssl_cert_reqs": ssl.CERT_REQUIRED,
        }

    def client_context(self) -> ssl.SSLContext:
        """For a client that trusts only servers with a certificate of the authority. Raises ConfigError where the
        files are of no use."""
        return self._loaded(ssl.PROTOCOL_TLS_CLIENT)

    def _loaded(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{self.authority} is no certificate of an authority: {_reason(error)}") from error
        try:
            # A key with a passphrase would be asked for at the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{self.certificate} and {self.key} are no certificate with its key, unencrypted: {_reason(error)}"
            ) from error
        return context

    def ends(self) -> datetime:
        """Until when this machine's certificate is valid."""
        from cryptography import x509

        return x509.load_pem_x509_certificate(Path(self.certificate).read_bytes()).not_valid_after_utc

    def warning(self) -> str | None:
        """What is to be said of a certificate that ends soon or has ended."""
        left = self.ends() - datetime.now(UTC)
        if left > timedelta(days=EARLY_DAYS):
            return None
        when = "ended" if left < timedelta(0) else "ends"
        return f"certificate {self.certificate} {when} on {self.ends():%Y-%m-%d}; issue it anew"


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or type(error).__name__


@dataclass(frozen=True)
class Issued:
    """What `issue` did for a machine."""

    machine: str
    files: TLSFiles
    is_new: bool


def issue(folder: Path, machines: Sequence[str]) -> list[Issued]:
    """Certificates for machines, host names or addresses, from the authority in ``folder``, made where there is none:
    ``ca.pem`` and ``ca.key.pem``; of each machine ``NAME.pem`` and ``NAME.key.pem``. Keys can be read by their
    owner alone. One that there is and that does not end within `EARLY_DAYS` stays.

    Raises ConfigError for a name that no machine has, and for an authority that is not whole.
    """
    for machine in machines:
        # Files of one whose name ends in .key would be those of another's key.
        is_taken = machine.lower() == "ca" or machine.lower().endswith(".key")
        if is_taken or not (_address(machine) or _HOST_NAME.fullmatch(machine)):
            raise ConfigError(f"{machine!r} is no name or address of a machine")
    folder.mkdir(parents=True, exist_ok=True)
    authority = _authority(folder)
    return [_of_machine(folder, authority, machine) for machine in machines]


def _authority(folder: Path) -> tuple[Any, Any]:
    """Its certificate and key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    certificate, key = folder / "ca.pem", folder / "ca.key.pem"
    if certificate.exists() != key.exists():
        missing, there = (key, certificate) if certificate.exists() else (certificate, key)
        raise ConfigError(f"{missing} is missing next to {there}; put it back, or remove both and all that they signed")
    if not certificate.exists():
        _write(certificate, key, "rollout", None, AUTHORITY_DAYS)
    try:
        return (
            x509.load_pem_x509_certificate(certificate.read_bytes()),
            load_pem_private_key(key.read_bytes(), password=None),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{certificate} and {key} are no authority: {error}") from error


def _of_machine(folder: Path, authority: tuple[Any, Any], machine: str) -> Issued:
    name = machine.replace(":", "-")
    files = TLSFiles(str(folder / "ca.pem"), str(folder / f"{name}.pem"), str(folder / f"{name}.key.pem"))
    with contextlib.suppress(ConfigError, ValueError, OSError):
        files.client_context()  # the key fits
        if files.warning() is None and _is_of(files, authority[0], machine):
            return Issued(machine, files, is_new=False)
    _write(Path(files.certificate), Path(files.key), machine, authority, MACHINE_DAYS)
    return Issued(machine, files, is_new=True)


def _is_of(files: TLSFiles, authority: Any, machine: str) -> bool:
    """Whether the certificate is the machine's, and by this authority."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    found = x509.load_pem_x509_certificate(Path(files.certificate).read_bytes())
    try:
        found.verify_directly_issued_by(authority)
    except (ValueError, InvalidSignature):
        return False
    return found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value == _names(machine)


def _names(machine: str) -> Any:
    """By which clients know it."""
    from cryptography import x509

    address = _address(machine)
    return x509.SubjectAlternativeName([x509.IPAddress(address) if address else x509.DNSName(machine)])


def _address(machine: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(machine)
    except ValueError:
        return None


def _write(certificate: Path, key: Path, name: str, authority: tuple[Any, Any] | None, days: int) -> None:
    """A new key and a certificate of it: of the authority's own where there is none yet. The key is written first: a
    certificate without a key is of no use, and is issued again."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    own = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    issuer, signing = (authority[0].subject, authority[1]) if authority else (subject, own)
    now = datetime.now(UTC)
    usage = dict.fromkeys(
        (
            "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
            "decipher_only",
        ),
        False,
    )  # fmt: skip
    usage |= {
        "digital_signature": authority is not None,
        "key_cert_sign": authority is None,
        "crl_sign": authority is None,
    }
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of machines differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=0 if authority is None else None), True)
        .add_extension(x509.KeyUsage(**usage), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), False)
    )
    if authority is not None:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), False).add_extension(_names(name), False)
    signed = builder.sign(signing, hashes.SHA256())
    text = own.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _replace(key, text, 0o600)
    _replace(certificate, signed.public_bytes(serialization.Encoding.PEM), 0o644)


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Write a file that is there as a whole or not at all, and is never readable by more than ``mode`` says."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
