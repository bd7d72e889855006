"""Facts about the inside of every sandbox that several layers rely on.

Used by the drivers, which set them for the guest, and by `runtime/guest/exec_request.py`, which sets them for commands.
The guest has the same default (`guest/supervisor.c`) for a client that sends no environment.
"""

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH inside, where a command's environment does not set it."""
GUEST = "/run/atoll/guest"
"""Where the guest's program is mounted."""
