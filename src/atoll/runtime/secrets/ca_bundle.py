"""How the inside comes to trust an authority that only its own sandbox has.

Knows where distributions keep the certificates that they trust, and which variables tell programs of it. Refuses to
know what the authority vouches for (`authority.py`).

What is written are ordinary files in the sandbox's own layer, so they are there after a fork, a restore and a wake; and
one of them where `update-ca-certificates` looks for more, so that it does not undo it. What the image trusts stays
trusted. An image with no bundle gets this machine's: some programs trust nothing but what the variables name.
"""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from atoll.contract.errors import InvalidRequest, PathNotDirectory, PathNotFound
from atoll.runtime.guest.files import Files
from atoll.runtime.secrets.authority import Authority

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
"""Where Debian, Ubuntu, Alpine, Arch and distroless images have it. Where it is missing, it is made."""
_OTHERS = (
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Where others have it, the first of which is what such an image trusts."""
_LOCAL = "/usr/local/share/ca-certificates/atoll.crt"
_LIMIT_BYTES = 16 * 1024 * 1024
_TOLD = (
    *("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS"),
    *("AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "DENO_CERT", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
)
# Not PIP_CERT: pip takes REQUESTS_CA_BUNDLE, and that one may be what an index of this machine's is trusted by.

VARIABLES = dict.fromkeys(_TOLD, BUNDLE)
"""What programs are told that do not look there by themselves."""


async def install(files: Files, authority: Authority | None) -> None:
    """Have the programs of a sandbox trust `authority`, if there is one, besides what they trust already.

    Raises:
        FileError: the image is such that it cannot be written.
        InvalidRequest: one of its bundles is too large to be one.
    """
    if authority is None:
        return
    certificate = authority.certificate.encode()
    trusted = None
    for path in (BUNDLE, *_OTHERS):
        content = await _read(files, path)
        if content is None:
            continue
        trusted = trusted or content
        if certificate not in content:  # it may be another name of one that was written already
            await _write(files, path, _joined(content, certificate))
    if not await files.exists(BUNDLE, user="root"):
        await _write(files, BUNDLE, _joined(trusted or _machines_own(), certificate))
    await _write(files, _LOCAL, certificate)
    await _write(files, f"/etc/ssl/certs/{authority.trusted_as}", certificate)


def _joined(bundle: bytes, certificate: bytes) -> bytes:
    return bundle + (b"\n" if bundle and not bundle.endswith(b"\n") else b"") + certificate


async def _read(files: Files, path: str) -> bytes | None:
    try:
        content = await files.read_bytes(path, limit=_LIMIT_BYTES + 1, user="root")
    except (PathNotFound, PathNotDirectory):
        return None
    if len(content) > _LIMIT_BYTES:
        raise InvalidRequest(f"{path} in the image is too large to be a bundle of certificates; secrets need one")
    return content


async def _write(files: Files, path: str, content: bytes) -> None:
    await files.write_bytes(path, content, parents=True, mode=0o644, user="root")


def _machines_own() -> bytes:
    place = ssl.get_default_verify_paths().cafile
    for path in (BUNDLE, *_OTHERS, *([place] if place else [])):
        with contextlib.suppress(OSError):
            return Path(path).read_bytes()
    return b""
