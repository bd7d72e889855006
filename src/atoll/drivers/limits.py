"""Which limits of a sandbox a driver can enforce on this machine: what it cannot is refused, never ignored.

Owns the reasons and the fixes in the refusal. Not here: setting the limits (`cgroups.py`, `bundle.py`), disk quotas
(`storage.py`). Used by `oci.py` and `bwrap.py` before they launch a sandbox or change its limits.
"""

from __future__ import annotations

import resource

from atoll.contract.driver import Capabilities
from atoll.contract.errors import Unenforceable
from atoll.contract.model import Limits, RuntimeName

MIN_OPEN_FILES = 64
"""The hard limit below which no guest is started: it has few descriptors of its own, and up to 20 for a command."""


def check_limits(limits: Limits, able: Capabilities, name: RuntimeName) -> None:
    """
    Raises:
        Unenforceable: one of `limits` cannot be enforced, or this process may open too few files for a guest, which
            inherits that limit; the message says why and how to get it.
    """
    for limit, value, can in (
        ("memory", limits.memory_bytes, able.memory_limit),
        ("CPU", limits.cpus, able.cpu_limit),
        ("pids", limits.pids, able.pids_limit),
    ):
        if value is not None and not can:
            why, fix = "this user may not use cgroups", "run as root, or as a user to whom systemd delegates cgroups"
            if able.memory_limit:
                why, fix = f"the host does not see the processes of {name}", "limit memory instead, or use crun"
            elif not able.chosen_by_default:
                why, fix = f"{name} has no cgroups", "use crun as root"
            raise Unenforceable(
                f"a {limit} limit cannot be enforced here: {why}; leave the limit out, or {fix}",
                hint="atoll doctor",
                limit=limit.lower(),
            )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < MIN_OPEN_FILES:
        raise Unenforceable(
            f"a process can have at most {hard} open files here, and a sandbox needs {MIN_OPEN_FILES}; raise this "
            "user's hard limit on open files",
            hint="ulimit -Hn",
            limit="open_files",
        )
    if limits.open_files is not None and limits.open_files > hard:
        raise Unenforceable(
            f"a process can have at most {hard} open files here; request fewer, or raise this user's limit",
            hint="ulimit -Hn",
            limit="open_files",
        )


def check_change(changes: Limits, able: Capabilities, name: RuntimeName, *, running: bool) -> None:
    """
    Raises:
        Unenforceable: one of `changes`, the limits that are set, cannot be enforced, or not while the sandbox runs.
    """
    check_limits(changes, able, name)
    if running and changes.open_files is not None:
        raise Unenforceable(
            "the limit on open files cannot be changed while the sandbox runs: each of its processes has it already; "
            "put the sandbox to sleep first",
            hint="atoll sleep NAME",
            limit="open_files",
        )
