"""The vault: the secrets of a sandbox, encrypted in its records.

Owns what of a sandbox is secret, the key of a state directory, and encryption. Not here: what values are used for
(`injection.py`, `ca_bundle.py`), and storing the encrypted text: manifests and checkpoints contain it, so a sandbox
that is opened, woken, restored or forked has its secrets again. Used by the engine.

The key is `ATOLL_SECRETS_KEY` or, if that is unset, the file `key` in the state directory, created when it is first
needed: `docs/design/0010-secrets.md` says what each protects from.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from atoll.contract.errors import InvalidRequest, SandboxError
from atoll.contract.frozen import Field, Frozen
from atoll.contract.names import check_env
from atoll.runtime.secrets import ca_bundle
from atoll.runtime.secrets.authority import Authority
from atoll.settings import SHORTEST_KEY

if TYPE_CHECKING:
    from pydantic import SecretStr

    from atoll.contract.secret import Secret

_PURPOSE = b"atoll secrets 1"
_NONCE_BYTES = 12


class StoredSecret(Frozen):
    """A secret as it is stored, with its placeholder."""

    placeholder: str
    """What programs inside get instead of the value."""
    value: str = Field(repr=False)
    hosts: tuple[str, ...]
    header: str


class SandboxSecrets(Frozen):
    """Everything secret about a sandbox. Only ever written encrypted."""

    version: Literal[1] = 1
    secrets: dict[str, StoredSecret] = Field(default_factory=dict)
    """By the name of the variable that has the placeholder."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Variables that programs inside get unchanged, and that are shown nowhere else."""
    authority: Authority | None = None
    """The certificate authority that programs inside trust for the secrets' hosts. Unset: no host has TLS."""
    headers: dict[str, dict[str, str]] = Field(default_factory=dict, repr=False)
    """Headers that are set in requests, by host, as `check_request_headers` gives them."""
    header_authority: Authority | None = None
    """The same for the hosts of `headers`. Its own, because these change: programs go on trusting the other one."""
    header_hosts: tuple[str, ...] = ()
    """The hosts that it can sign for."""

    @classmethod
    def of(
        cls,
        secrets: Mapping[str, Secret],
        secret_env: Mapping[str, str | SecretStr] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> SandboxSecrets | None:
        """New secrets, with new placeholders and a new authority. None: nothing is secret.

        Raises:
            InvalidRequest: a name is not valid for a variable, or is given twice, `env` included; a value is not text.
        """
        if not secrets and not secret_env:
            return None
        from atoll.contract.secret import PLAIN_HTTP, Secret, check_secret_env

        given = [*secrets, *(secret_env or {}), *(env or {})]
        twice = [name for name in given if given.count(name) > 1]
        if twice:
            raise InvalidRequest(
                f"the variable {twice[0]} is given twice; pass it as a secret or as a plain variable, not both"
            )
        for name, secret in secrets.items():
            if not isinstance(secret, Secret):
                raise InvalidRequest(f"the secret {name} is a {type(secret).__name__}; pass Secret(value, hosts=[...])")
        hosts = {host for secret in secrets.values() for host in secret.hosts if not host.startswith(PLAIN_HTTP)}
        return cls(
            secrets={
                name: StoredSecret(
                    placeholder=f"atoll_secret_{os.urandom(16).hex()}",
                    value=secret.value.get_secret_value(),
                    hosts=secret.hosts,
                    header=secret.header,
                )
                for name, secret in secrets.items()
            },
            env=check_secret_env(secret_env or {}),
            authority=Authority.make(hosts) if hosts else None,
        )

    def with_headers(self, headers: Mapping[str, Mapping[str, str]]) -> SandboxSecrets:
        """These secrets, with other headers to set. The authority stays as long as it can sign for all hosts."""
        from atoll.contract.secret import PLAIN_HTTP

        hosts = {host.removeprefix("*.") for host in headers if not host.startswith(PLAIN_HTTP)}
        kept = {host: dict(each) for host, each in headers.items()}
        if hosts and self.header_authority is not None and hosts <= {*self.header_hosts}:
            return self.model_copy(update={"headers": kept})
        return self.model_copy(
            update={
                "headers": kept,
                "header_authority": Authority.make(hosts) if hosts else None,
                "header_hosts": tuple(sorted(hosts)),
            }
        )

    def variables(self) -> dict[str, str]:
        """The variables for programs inside that are not secret: placeholders and the CA bundle."""
        placeholders = {name: secret.placeholder for name, secret in self.secrets.items()}
        return check_env({**(ca_bundle.VARIABLES if self.authority else {}), **placeholders})


class Vault:
    """Encrypts and decrypts the secrets of one state directory: AES-GCM, `seal` and `open`."""

    def __init__(self, state_dir: Path, key: SecretStr | None) -> None:
        self._path = state_dir / "key"
        self._given = key

    def seal(self, secrets: SandboxSecrets) -> str:
        """Encrypt, as text for a record."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(_NONCE_BYTES)
        sealed = AESGCM(self._key()).encrypt(nonce, secrets.model_dump_json().encode(), _PURPOSE)
        return base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str) -> SandboxSecrets:
        """
        Raises:
            SandboxError: it was encrypted with another key, or was changed.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = self._key()
        secrets = None
        with contextlib.suppress(InvalidTag, ValueError):  # their messages could contain secrets
            data = base64.b64decode(sealed, validate=True)
            opened = AESGCM(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _PURPOSE)
            secrets = SandboxSecrets.model_validate_json(opened)
        if secrets is None:
            raise SandboxError(
                "cannot decrypt the sandbox's secrets: they were encrypted with another key, or were changed",
                hint=f"set ATOLL_SECRETS_KEY as it was when the sandbox was created, or restore {self._path}",
            )
        return secrets

    def _key(self) -> bytes:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        secret = self._given.get_secret_value().encode() if self._given else self._from_file()
        return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret)

    def _from_file(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self._read()
        # Complete before it has its name, and never replaced: several processes may create it at the same time.
        temporary = self._path.with_name(f"key.{os.urandom(4).hex()}.new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, base64.urlsafe_b64encode(os.urandom(32)).rstrip(b"="))
            os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self._path)
        finally:
            os.close(fd)
            temporary.unlink()
        return self._read()

    def _read(self) -> bytes:
        with open(self._path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise InvalidRequest(
                    "the key file of the state directory is readable by other users, so it is not used for secrets",
                    hint=f"chmod 600 {self._path}",
                )
            key = file.read().strip()
        if len(key) < SHORTEST_KEY:
            raise InvalidRequest(
                "the key file of the state directory was not created by Atoll, so it is not used for secrets",
                hint=f"restore {self._path}, or remove it if no secret was encrypted with it",
            )
        return key
