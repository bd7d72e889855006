"""CA bundles: how programs inside come to trust the certificate authority of their own sandbox.

Owns where distributions have their CA bundles, and the variables that point programs to one. Not here: what the
authority signs (`authority.py`). Used by the engine, when a sandbox with secrets is created or claimed.

What is written are ordinary files in the sandbox's own layer, so they are there after a fork, a restore and a wake; one
of them is where `update-ca-certificates` looks for more certificates, so that it does not undo this. What the image
trusts stays trusted. An image without a bundle gets this machine's: some programs trust only what the variables name.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.contract.errors import InvalidRequest, PathNotDirectory, PathNotFound

if TYPE_CHECKING:
    from atoll.runtime.guest.files import Files
    from atoll.runtime.secrets.authority import Authority

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
"""The path in Debian, Ubuntu, Alpine, Arch and distroless images. Created where it is missing."""
_OTHER_BUNDLES = (
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""The paths in other images. The first that exists is what the image trusts."""
_LOCAL_CERTIFICATE = "/usr/local/share/ca-certificates/atoll.crt"
_MAX_BUNDLE_BYTES = 16 * 1024 * 1024
_VARIABLE_NAMES = (
    *("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS"),
    *("AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "DENO_CERT", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
)
# Not PIP_CERT: pip reads REQUESTS_CA_BUNDLE, and PIP_CERT may be the bundle for a package index of this machine.

VARIABLES = dict.fromkeys(_VARIABLE_NAMES, BUNDLE)
"""For programs that do not use the bundle by default."""


async def install(files: Files, authority: Authority) -> None:
    """Make programs of a sandbox trust `authority` in addition to what they trust already.

    Raises:
        FileError: a bundle cannot be written in this image.
        InvalidRequest: a bundle of the image is too large.
    """
    certificate = authority.certificate.encode()
    trusted = None
    for path in (BUNDLE, *_OTHER_BUNDLES):
        content = await _read(files, path)
        if content is None:
            continue
        trusted = trusted or content
        if certificate not in content:  # it may be a link to one that was written already
            await _write(files, path, _joined(content, certificate))
    if not await files.exists(BUNDLE, user="root"):
        await _write(files, BUNDLE, _joined(trusted or _host_bundle(), certificate))
    await _write(files, _LOCAL_CERTIFICATE, certificate)
    await _write(files, hashed(authority), certificate)


def hashed(authority: Authority) -> str:
    """The file that `install` writes last: where OpenSSL looks for the authority's certificate."""
    return f"/etc/ssl/certs/{authority.openssl_name}"


def _joined(bundle: bytes, certificate: bytes) -> bytes:
    return bundle + (b"\n" if bundle and not bundle.endswith(b"\n") else b"") + certificate


async def _read(files: Files, path: str) -> bytes | None:
    try:
        content = await files.read_bytes(path, limit=_MAX_BUNDLE_BYTES + 1, user="root")
    except (PathNotFound, PathNotDirectory):
        return None
    if len(content) > _MAX_BUNDLE_BYTES:
        raise InvalidRequest(
            f"{path} in the image is larger than {_MAX_BUNDLE_BYTES} bytes, so it is not a CA bundle; secrets need one"
        )
    return content


async def _write(files: Files, path: str, content: bytes) -> None:
    await files.write_bytes(path, content, parents=True, mode=0o644, user="root")


def _host_bundle() -> bytes:
    import ssl

    place = ssl.get_default_verify_paths().cafile
    for path in (BUNDLE, *_OTHER_BUNDLES, *([place] if place else [])):
        with contextlib.suppress(OSError):
            return Path(path).read_bytes()
    return b""
