"""The package indexes that this machine is configured for: what the preset `registries` expands to.

Owns where pip, npm and apt have their settings; asks the tools themselves for their defaults, so that no index is named
here. Not here: policies (`policy.py`) and sandboxes. Used by the engine, when a policy with the preset is set.

No secret is passed on: user names and passwords in the URLs of indexes are removed, so an index that requires them does
not respond inside. Indexes in the machine's own file system are left out too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import subprocess
import sys
from ast import literal_eval
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from urllib.parse import SplitResult, urlsplit, urlunsplit

import anyio
import anyio.to_thread

from atoll.contract.errors import InvalidRequest, Unenforceable
from atoll.contract.network import PackageIndexes, Rule, parse_rule, read_host
from atoll.settings import program_environment

CERTIFICATES = "/etc/atoll/certificates"
"""The directory inside for the CA bundles of the indexes."""
CACHE_S = 60.0
"""How long the answers of the tools are cached: asking them takes a second."""
_TOOL_TIMEOUT_S = 30
_PORTS = {"http": 80, "https": 443}
# `pip config list` has all that is configured, but not pip's default index, nor the second host on which that index has
# its files. No pip command says the latter, and neither host is to be named here, so pip's own module is asked.
_PIP_DEFAULTS = """
import json
from pip._internal.models.index import PyPI
print(json.dumps({"index": PyPI.simple_url, "files": PyPI.file_storage_domain}))
"""
_PIP_SETTING = re.compile(r"""^([^\s.]+)\.(\S+?)=('.*'|".*")$""", re.MULTILINE)
_log = logging.getLogger(__name__)


@dataclass
class _ToolConfig:
    """The indexes that one tool is configured for."""

    urls: list[SplitResult] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    certificates: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def trust(self, tool: str, bundle: object, variable: str) -> None:
        """Pass a CA bundle to a tool inside."""
        if isinstance(bundle, str) and bundle and Path(bundle).is_file():
            inside = f"{CERTIFICATES}/{tool}.pem"
            self.certificates[inside] = bundle
            self.env[variable] = inside


async def find() -> PackageIndexes:
    """The indexes that this machine is configured for now.

    Raises:
        Unenforceable: there are none.
    """
    found: list[_ToolConfig] = []

    async def collect(tool: Iterator[_ToolConfig]) -> None:
        found.extend(await anyio.to_thread.run_sync(lambda: list(tool)))

    async with anyio.create_task_group() as group:
        for tool in (pip(), npm(), apt()):
            group.start_soon(collect, tool)
    rules = {_rule(url) for each in found for url in each.urls}
    if not rules:
        raise Unenforceable(
            "this machine is configured for no package index, so the preset 'registries' is empty; name hosts instead",
            hint="check pip config list, npm config list and /etc/apt/sources.list.d",
        )
    env = {name: value for each in found for name, value in each.env.items()}
    certificates = {inside: here for each in found for inside, here in each.certificates.items()}
    return PackageIndexes(
        allow=tuple(sorted(map(str, rules))),
        env=dict(sorted(env.items())),
        certificates=certificates,
        files={path: content for each in found for path, content in each.files.items()},
    )


def _rule(url: SplitResult) -> Rule:
    host, port = read_host(url.hostname or ""), url.port or _PORTS[url.scheme]
    return parse_rule(f"{host}:{port}" if isinstance(host, str) or host.version == 4 else f"[{host}]:{port}")


def _remote(text: object) -> SplitResult | None:
    """The URL of an index on the network, without user name and password. None: it is not one."""
    with contextlib.suppress(ValueError, InvalidRequest):
        url = urlsplit(str(text).strip())
        if url.scheme in _PORTS and url.hostname:
            url = url._replace(netloc=url.netloc.rpartition("@")[2])
            _rule(url)
            return url
    return None


def _remotes(texts: Iterable[object]) -> list[SplitResult]:
    return [url for url in map(_remote, texts) if url is not None]


def _output(arguments: list[str]) -> str | None:
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            check=True,
            cwd="/",
            env=program_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("cannot read the configuration of %s: %s", arguments[0], error)
        return None
    return done.stdout


def pip() -> Iterator[_ToolConfig]:
    """pip's files and PIP_ variables, merged by pip itself; without any, pip's default index."""
    for python in dict.fromkeys(filter(None, (which("python3"), sys.executable))):
        listed = _output([python, "-m", "pip", "config", "list", "-vvv"])  # loud: a setting may make pip quiet
        if listed is None:
            continue
        settings = _pip_settings(listed)
        defaults = json.loads(_output([python, "-c", _PIP_DEFAULTS]) or "{}")
        index = _remote(settings.get("index-url", defaults.get("index")))
        extra = _remotes(settings.get("extra-index-url", "").split())
        found = _ToolConfig(urls=[*extra])
        if index is not None:
            found.urls.append(index)
            found.env["PIP_INDEX_URL"] = urlunsplit(index)
            if defaults and index.hostname == urlsplit(defaults["index"]).hostname:
                found.urls.append(urlsplit(f"{index.scheme}://{defaults['files']}"))
        if extra:
            found.env["PIP_EXTRA_INDEX_URL"] = " ".join(map(urlunsplit, extra))
        if trusted := settings.get("trusted-host", "").split():
            found.env["PIP_TRUSTED_HOST"] = " ".join(trusted)
        found.trust("pip", settings.get("cert"), "PIP_CERT")
        yield found
        return


def _pip_settings(listed: str) -> dict[str, str]:
    """Settings by name. Those for `install` override global ones, and variables override both."""
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for where, name, value in _PIP_SETTING.findall(listed):
            if where == section:
                settings[name] = str(literal_eval(value))
    return settings


def npm() -> Iterator[_ToolConfig]:
    """npm's files and variables, merged by npm itself."""
    program = which("npm")
    said = _output([program, "config", "list", "--long"]) if program else None
    if said is None:
        return
    # Its JSON leaves scopes out. A setting in force is a line of its own; an overridden one is commented out.
    settings: dict[str, object] = {}
    for key, value in re.findall(r"^([^;\s]\S*) = (.+)$", said, flags=re.MULTILINE):
        with contextlib.suppress(ValueError):
            settings[key] = json.loads(value)
    found = _ToolConfig()
    if registry := _remote(settings.get("registry")):
        found.urls.append(registry)
        found.env["npm_config_registry"] = urlunsplit(registry)
    for key, value in settings.items():
        if key.startswith("@") and key.endswith(":registry") and (scoped := _remote(value)):
            found.urls.append(scoped)  # npm reads its scope from files only
    found.trust("npm", settings.get("cafile"), "npm_config_cafile")
    yield found


_APT_LINE = re.compile(r"^\s*(deb(?:-src)?\s+(?:\[[^\]]*\]\s*)?)(\S+)(\s+\S.*)$", re.MULTILINE)
_APT_CONF = 'APT::Sandbox::User "root";\n'
"""Without a user of its own for downloads: a sandbox may have one user id only."""


def apt(root: Path = Path("/etc/apt")) -> Iterator[_ToolConfig]:
    """The sources of apt, in the one-line and in the deb822 format, and the same sources for the inside."""
    found, lines, paragraphs = _ToolConfig(), [], []
    for path in [root / "sources.list", *sorted((root / "sources.list.d").glob("*"))]:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = path.read_text()
            if path.suffix == ".list":
                for kind, uri, rest in _APT_LINE.findall(text):
                    if url := _remote(uri):
                        found.urls.append(url)
                        lines.append(f"{kind}{urlunsplit(url)}{rest}\n")
            elif path.suffix == ".sources":
                for paragraph in re.split(r"\n[ \t]*\n", text):
                    urls, inside = _apt_paragraph(paragraph)
                    found.urls += urls
                    paragraphs += [inside] if urls else []
    if not found.urls:
        return
    directory = "/etc/apt/sources.list.d/atoll"
    found.files = {"/etc/apt/apt.conf.d/90atoll": _APT_CONF}
    if lines:
        found.files[f"{directory}.list"] = "".join(lines)
    if paragraphs:
        found.files[f"{directory}.sources"] = "\n".join(paragraphs)
    yield found


def _apt_paragraph(text: str) -> tuple[list[SplitResult], str]:
    """The indexes on the network that a deb822 paragraph names, and the paragraph with these alone."""
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        if line[:1] in (" ", "\t") and name:
            fields[name] += f"\n{line}"
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    if fields.get("enabled", "yes").strip().lower() in {"no", "false", "0"}:
        return [], ""
    urls = _remotes(fields.get("uris", "").split())
    fields["uris"] = " ".join(map(urlunsplit, urls))
    return urls, "".join(f"{name.title()}: {value}\n" for name, value in fields.items())
