"""Where the values of secrets are while nobody needs them: in the records of a sandbox, encrypted.

Knows what of a sandbox is secret, the key of a state directory, and how one is sealed with the other. Refuses to know
what values are for (`intercept.py`, `trust.py`) and who keeps what was sealed: that is text which stands in manifests
and checkpoints, so that a sandbox which is taken up, woken, restored or forked has its secrets without asking anybody.

The key is `ATOLL_SECRETS_KEY` or, where that is not set, the file `key` in the state directory, made when it is first
needed: `docs/design/0010-secrets.md` says what each protects from.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets as randomness
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError

from atoll.contract.errors import InvalidRequest, SandboxError
from atoll.contract.model import Frozen, check_env
from atoll.contract.secret import PLAIN_HTTP, Secret, check_secret_env
from atoll.runtime.secrets import ca_bundle as trust
from atoll.runtime.secrets.authority import Authority
from atoll.settings import SHORTEST_KEY

_PURPOSE = b"atoll secrets 1"
_NONCE_BYTES = 12


class Kept(Frozen):
    """A secret that stays outside."""

    placeholder: str
    """What the inside has in its place: of no use to anybody else."""
    value: str = Field(repr=False)
    hosts: tuple[str, ...]
    header: str


class Contents(Frozen):
    """All that is secret about a sandbox. Written nowhere but into a seal."""

    version: Literal[1] = 1
    secrets: dict[str, Kept] = Field(default_factory=dict)
    """By the variable that holds the placeholder."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Variables that the inside has as they are, and that are shown to nobody else."""
    authority: Authority | None = None
    """Whom the inside trusts to be the secrets' hosts. Unset: none of them has TLS, or there are none."""

    @classmethod
    def of(
        cls,
        secrets: Mapping[str, Secret],
        secret_env: Mapping[str, str | SecretStr] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Contents | None:
        """What is to be kept of what was given, with new placeholders and a new authority. None: nothing is secret.

        Raises:
            InvalidRequest: a name cannot be a variable's, or is given twice, in `env` for one; a value is no text.
        """
        if not secrets and not secret_env:
            return None
        given = [*secrets, *(secret_env or {}), *(env or {})]
        twice = [name for name in given if given.count(name) > 1]
        if twice:
            raise InvalidRequest(f"the variable {twice[0]} is given twice; it is a secret or it is not")
        for name, secret in secrets.items():
            if not isinstance(secret, Secret):
                raise InvalidRequest(f"the secret {name} is a {type(secret).__name__}; give Secret(value, hosts=[...])")
        hosts = {host for secret in secrets.values() for host in secret.hosts if not host.startswith(PLAIN_HTTP)}
        return cls(
            secrets={
                name: Kept(
                    placeholder=f"atoll_secret_{randomness.token_hex(16)}",
                    value=secret.value.get_secret_value(),
                    hosts=secret.hosts,
                    header=secret.header,
                )
                for name, secret in secrets.items()
            },
            env=check_secret_env(secret_env or {}),
            authority=Authority.make(hosts) if hosts else None,
        )

    def variables(self) -> dict[str, str]:
        """What the inside has of it that is no secret."""
        placeholders = {name: kept.placeholder for name, kept in self.secrets.items()}
        return check_env({**(trust.VARIABLES if self.authority else {}), **placeholders})


class Vault:
    """Seals and opens for one state directory."""

    def __init__(self, state_dir: Path, key: SecretStr | None) -> None:
        self._path = state_dir / "key"
        self._given = key

    def seal(self, contents: Contents) -> str:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(_NONCE_BYTES)
        sealed = AESGCM(self._key()).encrypt(nonce, contents.model_dump_json().encode(), _PURPOSE)
        return base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str) -> Contents:
        """
        Raises:
            SandboxError: it was sealed with another key, or was changed.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = self._key()
        contents = None
        with contextlib.suppress(InvalidTag, ValueError, ValidationError):  # whose messages could hold what was opened
            data = base64.b64decode(sealed, validate=True)
            opened = AESGCM(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _PURPOSE)
            contents = Contents.model_validate_json(opened)
        if contents is None:
            raise SandboxError(
                "the sandbox's secrets cannot be opened: they were sealed with another key, or were changed",
                hint=f"set ATOLL_SECRETS_KEY as it was when the sandbox was made, or put back {self._path}",
            )
        return contents

    def _key(self) -> bytes:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        secret = self._given.get_secret_value().encode() if self._given else self._from_file()
        return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret)

    def _from_file(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self._read()
        # Whole before it has its name, and never in place of another: several may want to be the first.
        temporary = self._path.with_name(f"key.{randomness.token_hex(4)}.new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, randomness.token_urlsafe(32).encode())
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
                    "the key of the state directory can be read by others, so secrets are not kept with it",
                    hint=f"chmod 600 {self._path}",
                )
            key = file.read().strip()
        if len(key) < SHORTEST_KEY:
            raise InvalidRequest(
                "the key of the state directory is not one that Atoll has made, so secrets are not kept with it",
                hint=f"put back {self._path}, or remove it if nothing was sealed with it",
            )
        return key
