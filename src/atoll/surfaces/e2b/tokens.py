"""Ids, tokens and signatures of E2B: who may use a sandbox without an API key.

Owns how a sandbox is called (the SDK's ids have letters and digits only), its tokens, and the signatures of file URLs.
A token is an HMAC of the sandbox's id with a key of this server, so that none is stored, none is guessed, and that of
one sandbox is worth nothing for another. It is valid for as long as its sandbox exists, also when the API key that it
was given to is revoked, as at E2B. Used by all modules of this surface.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from atoll.contract.errors import InvalidRequest

TOKEN_HEADER = "x-access-token"  # noqa: S105 - a header's name
_SANDBOX = re.compile(r"atoll([0-9a-f]{16})")
_KEY_FILE = "e2b.key"
_KEY_BYTES = 32
SignedOperation = Literal["read", "write"]
Purpose = Literal["envd", "traffic", "upload"]


def public_id(id: str) -> str:
    """The id of a sandbox as E2B's clients know it: letters and digits, part of a host name."""
    return id.replace("-", "")


def sandbox_id(public: str) -> str | None:
    """The id behind one that a client sent. None: no sandbox can have it."""
    found = _SANDBOX.fullmatch(public)
    return f"atoll-{found[1]}" if found else None


class SandboxTokens:
    """The tokens of all sandboxes of one server."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def load(cls, directory: Path) -> SandboxTokens:
        """With the key that is kept in a directory. It is made when it is first asked for.

        Raises:
            InvalidRequest: the file there is not a key.
            OSError: it cannot be read or written.
        """
        path = directory / _KEY_FILE
        with suppress(FileNotFoundError):
            return cls(_read_key(path))
        directory.mkdir(mode=0o700, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(os.urandom(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was first: its key counts
                os.link(fresh, path)
        finally:
            fresh.unlink()
        return cls(_read_key(path))

    def of(self, id: str, purpose: Purpose = "envd") -> str:
        """The token of a sandbox, for its own plane or for its ports; or the signature of a link to upload files."""
        return hmac.new(self._key, f"{purpose}:{id}".encode(), hashlib.sha256).hexdigest()

    def matches(self, id: str, given: str, purpose: Purpose = "envd") -> bool:
        """Whether a token is that of this sandbox."""
        return hmac.compare_digest(self.of(id, purpose).encode(), given.encode("utf-8", "surrogateescape"))

    def signed(self, id: str, signature: FileSignature) -> bool:
        """Whether a signature was made with the token of this sandbox. Not whether it has expired."""
        end = "" if signature.expiration is None else f":{signature.expiration}"
        said = f"{signature.path}:{signature.operation}:{signature.user}:{self.of(id)}{end}"
        digest = hashlib.sha256(said.encode("utf-8", "surrogateescape")).digest()
        wanted = "v1_" + base64.b64encode(digest).rstrip(b"=").decode()
        return hmac.compare_digest(wanted.encode(), signature.text.encode("utf-8", "surrogateescape"))


class FileSignature:
    """What a signed URL says: one file, one operation, one user, until a moment."""

    def __init__(self, text: str, *, path: str, operation: SignedOperation, user: str, expiration: str | None) -> None:
        """
        Raises:
            InvalidRequest: the expiration is not a number.
        """
        if expiration is not None and not re.fullmatch(r"[0-9]{1,12}", expiration):
            raise InvalidRequest("signature_expiration is not a number of seconds")
        self.text = text
        self.path = path
        self.operation = operation
        self.user = user
        self.expiration = expiration

    @property
    def has_expired(self) -> bool:
        return self.expiration is not None and int(self.expiration) < time.time()


def _read_key(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise InvalidRequest(f"{path} is not a key of {_KEY_BYTES} bytes; remove it to have a new one made")
    return key
