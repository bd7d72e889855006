"""Certificate authorities: that of one sandbox, for the hosts of its secrets, and that of a server with its own names.

Owns certificates: how the authority is created, how it signs a certificate for a host for some days, and the file name
that OpenSSL looks for. Not here: how programs inside come to trust it (`ca_bundle.py`), where its key is stored
(`vault.py`), and what is done with a terminated connection (`injection.py`).

The authority's certificate names the hosts that it may sign for, in a critical name constraint: software that does not
understand it must reject the certificate. With a stolen key one could impersonate those hosts, to this sandbox and its
forks, and nothing else. `surfaces/serve/tls.py` has one for the names of a server.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timedelta
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

from atoll.contract.frozen import Field, Frozen
from atoll.runtime.state.store import now

if TYPE_CHECKING:
    import ssl

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_AUTHORITY_LIFETIME = timedelta(days=3650)
"""As long as a sandbox may exist: its processes keep in memory what they trust."""
_LEAF_LIFETIME = timedelta(days=7)
_CLOCK_SKEW = timedelta(days=1)
"""How long before it was issued a certificate is valid: clocks differ."""


class Authority(Frozen):
    certificate: str
    """PEM. Not secret: programs inside trust it."""
    key: str = Field(repr=False)
    """PEM. Never inside."""

    @classmethod
    def make(cls, hosts: Iterable[str], addresses: Iterable[str] = (), *, title: str = "atoll sandbox") -> Authority:
        """A new one that can sign for `hosts`, for names below them, and for IP addresses."""
        from cryptography import x509

        key = _new_key()
        # In lower case, as OpenSSL converts a name before it hashes it: see `openssl_name`.
        name = _name(f"{title} {os.urandom(4).hex()}")
        networks = [x509.IPAddress(ip_network(address)) for address in sorted(set(addresses))]
        permitted = [*(x509.DNSName(host) for host in sorted(set(hosts))), *networks]
        excluded = None if networks else [x509.IPAddress(ip_network(every)) for every in ("0.0.0.0/0", "::/0")]
        certificate = (
            _certificate(name, key.public_key(), issuer=name, authority=key.public_key(), lasts=_AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .add_extension(x509.NameConstraints(permitted, excluded), critical=True)
        )
        return cls(certificate=_signed(certificate, key), key=_key_pem(key))

    def issue(self, hosts: Iterable[str], addresses: Iterable[str] = (), *, lasts: timedelta) -> tuple[str, str]:
        """A certificate for these, and its key, both as PEM."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509.oid import ExtendedKeyUsageOID

        authority = x509.load_pem_x509_certificate(self.certificate.encode())
        signer: ec.EllipticCurvePrivateKey = load_pem_private_key(self.key.encode(), None)  # type: ignore[assignment]
        key = _new_key()
        names = [*map(x509.DNSName, hosts), *(x509.IPAddress(ip_address(address)) for address in addresses)]
        certificate = (
            _certificate(
                x509.Name([]), key.public_key(), issuer=authority.subject, authority=signer.public_key(), lasts=lasts
            )
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        )
        return _signed(certificate, signer), _key_pem(key)

    @property
    def openssl_name(self) -> str:
        """The file name that OpenSSL looks for in a certificate directory: a hash of the subject without its header."""
        from cryptography import x509

        subject = x509.load_pem_x509_certificate(self.certificate.encode()).subject.public_bytes()
        import hashlib

        digest = hashlib.sha1(subject[2:], usedforsecurity=False).digest()
        return f"{int.from_bytes(digest[:4], 'little'):08x}.0"


class Issuer:
    """Signs certificates for hosts, each for some days, as long as this process lives."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._contexts: dict[str, tuple[ssl.SSLContext, datetime]] = {}

    def context(self, host: str) -> ssl.SSLContext:
        """The TLS context of a server that is `host`, for clients that trust the authority and ask for that host."""
        context, until = self._contexts.get(host, (None, now()))
        if context is None or now() >= until:
            context = _server_context(host, *self._authority.issue([host], lasts=_LEAF_LIFETIME))
            self._contexts[host] = context, now() + _LEAF_LIFETIME / 2
        return context


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """The TLS context of a server with this certificate. Its key is not written to a disk."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    # OpenSSL reads a file, and the key must not be on disk.
    fd = os.memfd_create("atoll", os.MFD_CLOEXEC)
    try:
        os.write(fd, (certificate + key).encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}", password="")
    finally:
        os.close(fd)
    return context


def _server_context(host: str, certificate: str, key: str) -> ssl.SSLContext:
    import ssl

    context = server_context(certificate, key)

    def check_name(_connection: object, asked_for: str | None, _context: object) -> int | None:
        wrong = asked_for is not None and asked_for.lower() != host
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME if wrong else None

    context.sni_callback = check_name
    return context


# ---- certificates ----


def _name(common: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    *,
    issuer: x509.Name,
    authority: ec.EllipticCurvePublicKey,
    lasts: timedelta,
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _CLOCK_SKEW)
        .not_valid_after(now() + lasts)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(certificate: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives import hashes, serialization

    return certificate.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
