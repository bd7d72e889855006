"""TLS of the server: a certificate that is given, or one of our own; read again when it changes.

Owns the certificate of new connections. Given files are looked at every two seconds and on SIGHUP; a pair that cannot
be used (half written, say) leaves the one before in use. Our own is signed by an authority below the state directory,
which may sign for the server's names and nothing else: who trusts it trusts no more than this server. Not here:
connections (`surfaces/door/listening.py`). Used by `process.py`.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from atoll.contract.errors import InvalidRequest
from atoll.runtime.secrets.authority import Authority, server_context

if TYPE_CHECKING:
    from atoll.surfaces.serve.settings import ServerSettings

_LOOK_S = 2.0
_LASTS = timedelta(days=90)
_RENEW_S = timedelta(days=30).total_seconds()
_LOOPBACK = ("127.0.0.1", "::1")
_log = logging.getLogger(__name__)


class ServerTls:
    """The certificate in use."""

    def __init__(self, settings: ServerSettings, state_dir: Path) -> None:
        """
        Raises:
            InvalidRequest: the certificate or its key cannot be used.
        """
        self._files = (settings.tls_cert, settings.tls_key)
        self._domain = settings.domain
        self._names = tuple(dict.fromkeys((settings.domain, "localhost", *(settings.tls_self_signed or ()))))
        self._directory = state_dir / "server" / "tls"
        self._stamps: list[tuple[int, int, int]] = []
        self.authority: Path | None = None
        """The certificate of our own authority, for clients to trust. None: the certificate was given."""
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        return self._context

    def reload(self) -> None:
        """Use the certificate as it is now, if it can be used."""
        try:
            self._context = self._load()
        except InvalidRequest as error:
            _log.error("the certificate before stays in use: %s", error.message)
        else:
            _log.info("the certificate was read again")

    async def watch(self) -> None:
        """Reload when the files change; renew our own. Until it is cancelled."""
        if self.authority is not None:
            while True:
                await anyio.sleep(_RENEW_S)
                self.reload()
        while True:
            await anyio.sleep(_LOOK_S)
            if self._look() != self._stamps:
                self.reload()

    def _load(self) -> ssl.SSLContext:
        certificate, key = self._files
        if certificate is None or key is None:
            return self._own()
        self._stamps = self._look()
        try:
            return server_context(certificate.read_text(), "\n" + key.read_text())
        except ssl.SSLError as error:
            reason = error.reason or "not PEM, or the key has a password or is another's"
            raise InvalidRequest(f"the certificate {certificate} with the key {key} cannot be used: {reason}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the certificate {certificate} or the key {key} cannot be read: {error}") from None

    def _look(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._files:
            try:
                found = os.stat(path or "")
                stamps.append((found.st_ino, found.st_mtime_ns, found.st_size))
            except OSError:
                stamps.append((0, 0, 0))
        return stamps

    def _own(self) -> ssl.SSLContext:
        hosts = [name for name in self._names if not _is_address(name)]
        addresses = sorted({*_LOOPBACK, *filter(_is_address, self._names)})
        authority = self._own_authority(hosts, addresses)
        # A wildcard below a single label makes the certificate malformed to clients that use rustls.
        names = [*hosts, *(f"*.{host}" for host in hosts if "." in host or host == self._domain)]
        return server_context(*authority.issue(names, addresses, lasts=_LASTS))

    def _own_authority(self, hosts: list[str], addresses: list[str]) -> Authority:
        """The one of before, if it may sign for all of these; else a new one, which clients have to trust anew."""
        certificate, key, scope = (self._directory / name for name in ("ca.pem", "ca.key", "names"))
        wanted = " ".join([*sorted(hosts), *addresses])
        self.authority = certificate
        try:
            if scope.read_text() == wanted:
                return Authority(certificate=certificate.read_text(), key=key.read_text())
            _log.warning("the names of the server changed; clients have to trust the new authority %s", certificate)
        except FileNotFoundError:
            pass
        try:
            made = Authority.make(hosts, addresses, title="atoll server")
        except ValueError as error:
            raise InvalidRequest(f"tls_self_signed: {', '.join(hosts)}: {error}; give host names in ASCII") from None
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, text, mode in (
            (key, made.key, 0o600),
            (certificate, made.certificate, 0o644),
            (scope, wanted, 0o600),
        ):
            new = path.with_suffix(".new")
            new.unlink(missing_ok=True)
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                file.write(text)
            new.rename(path)
        return made


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def how_to_trust(authority: Path) -> str:
    """A line for the operator."""
    return (
        f"Clients have to trust the server's authority: ATOLL_CA_FILE={authority}, curl --cacert {authority}, "
        "or copy it to "
        "/usr/local/share/ca-certificates/atoll.crt and run update-ca-certificates"
    )
