"""Facts about the inside of every sandbox that several layers rely on.

Used by the drivers, which set them for the guest, by `runtime/guest/process.py`, which sets them for commands, and by
the egress server. The guest has the same default of PATH (`guest/program.c`) for a client that sends no environment.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH inside, where a command's environment does not set it."""
USER_PATH = f"/home/user/.local/bin:{DEFAULT_PATH}"
"""The same for commands of `user`: `pip install` and others put programs there. Root's has no directory in which other
users can write."""
EGRESS_PORT = 1023
"""The port of the egress proxy inside. Always the same, so that processes can still use it after a wake, a restore or a
fork. IANA reserves it, and only root inside could listen on it."""
GUEST = "/run/atoll/guest"
"""Where the guest's program is mounted."""

_URL = f"http://127.0.0.1:{EGRESS_PORT}"
_NAMES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
# The same port serves SOCKS, but no variable says so: some HTTP clients refuse to start when all_proxy is a SOCKS URL
# and they lack the package for it, even if they would never use it.
PROXY_ENV: Mapping[str, str] = {
    **{name: _URL for each in _NAMES for name in (each, each.upper())},
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1"),
}
"""For commands of a sandbox on whose egress port a process of the host answers, or the guest itself."""
