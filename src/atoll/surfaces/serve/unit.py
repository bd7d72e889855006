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
# 143: ended by SIGTERM, in order.
SuccessExitStatus=143
TimeoutStopSec=60
# Sandboxes and their keepers go on when the server stops, and have cgroups below this unit's.
KillMode=process
Delegate=yes
LimitNOFILE=1048576
TasksMax=infinity
OOMPolicy=continue

# Taken away from the server, and not from sandboxes. What would be inherited by them is left out on purpose: filters of
# system calls, no_new_privs (sudo inside), and mount namespaces, in which the command line would not see storage that
# the server mounts.
KeyringMode=private
CapabilityBoundingSet=~CAP_SYS_MODULE CAP_SYS_BOOT CAP_SYS_TIME CAP_SYS_RAWIO CAP_SYSLOG CAP_MAC_ADMIN CAP_MAC_OVERRIDE
CapabilityBoundingSet=~CAP_AUDIT_CONTROL CAP_AUDIT_READ CAP_SYS_PACCT CAP_SYS_TTY_CONFIG CAP_WAKE_ALARM CAP_BLOCK_SUSPEND
AmbientCapabilities=

[Install]
WantedBy=multi-user.target
"""


def unit_text(arguments: list[str]) -> str:
    """The unit that runs this installation's `atoll` with these arguments."""
    program = Path(sys.argv[0]).resolve()
    command = [str(program)] if program.name == "atoll" else [sys.executable, "-m", "atoll.surfaces.cli"]
    return _UNIT.format(command=" ".join(map(_quoted, [*command, "serve", *arguments])))


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
