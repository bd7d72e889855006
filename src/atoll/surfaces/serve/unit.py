"""The systemd unit of `atoll serve`: as much of the system taken away as sandboxes allow.

Owns the unit's text and how it is checked and written. Nothing is enabled or started. Used by `atoll serve --install`.

Sandboxes outlive the server: KillMode=process leaves their keepers alone, Delegate gives them cgroups of their own.
What a keeper needs cannot be taken from the server that starts it: namespaces, mounts, user ids.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from atoll.contract.errors import InvalidRequest
from atoll.settings import program_environment

SYSTEM = Path("/etc/systemd/system/atoll.service")
_DEFAULT = Path("/var/lib/atoll")
_CHECK_S = 30
_UNIT = """\
[Unit]
Description=Atoll: sandboxes for AI agents
After=network-online.target
Wants=network-online.target

[Service]
Type=exec
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=1
SuccessExitStatus=143
TimeoutStopSec=60
KillMode=process
{state}
ProtectSystem=strict
ProtectHome={home}
PrivateTmp=yes
NoNewPrivileges=yes

[Install]
WantedBy=multi-user.target
"""


def unit_text(arguments: list[str], state_dir: Path) -> str:
    """The unit that runs this installation's `atoll` with these arguments."""
    program = Path(sys.argv[0]).resolve()
    command = [str(program)] if program.name == "atoll" else [sys.executable, "-m", "atoll"]
    words = [*command, "serve", *arguments]
    homes = any(home in word for word in (*words, str(state_dir)) for home in ("/home/", "/root/"))
    owned = "StateDirectory=atoll\nStateDirectoryMode=0700"
    return _UNIT.format(
        command=" ".join(map(_quoted, words)),
        state=owned if state_dir == _DEFAULT else f"ReadWritePaths={_quoted(str(state_dir))}",
        home="read-only" if homes else "yes",
    )


def check(text: str, directory: Path) -> str | None:
    """What `systemd-analyze verify` says against a unit. None: nothing, or it is not here."""
    if shutil.which("systemd-analyze") is None:
        return None
    path = directory / SYSTEM.name
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=_CHECK_S,
        check=False,
        env=program_environment(),
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if SYSTEM.name in line]
    return "\n".join(ours) or None


def write(text: str, path: Path = SYSTEM) -> None:
    """
    Raises:
        InvalidRequest: it cannot be written.
    """
    try:
        new = path.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o644)
        new.rename(path)
    except OSError as error:
        raise InvalidRequest(
            f"the unit {path} cannot be written: {error.strerror}; run it as root, or see it with --dry-run"
        ) from error


def _quoted(word: str) -> str:
    """A word of a unit's line. `%` and `$` mean something there."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    if not escaped or any(each in escaped for each in " \t\"'\\;"):
        escaped = escaped.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return escaped
