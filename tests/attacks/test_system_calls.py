"""System calls that a sandbox has no use for, each tried as root and as a user."""

from __future__ import annotations

import errno
import platform

import pytest

from atoll.contract.model import RuntimeName
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import ABSENT, attempts, probe, unexpected

# What gVisor answers where that is not ENOSYS. Its kernel is the sandbox's own: these reach nothing of the host's.
_DENIED = {errno.EPERM}
_ARGUMENTS = {errno.EINVAL, errno.EFAULT}
GVISOR: dict[str, set[int]] = {
    **dict.fromkeys(("mount", "umount2", "pivot_root", "setns", "keyctl", "add_key", "request_key"), _DENIED),
    **dict.fromkeys(("unshare", "clone"), _DENIED),
    **dict.fromkeys(("settimeofday", "clock_settime", "reboot", "acct"), _DENIED),
    **dict.fromkeys(("swapon", "swapoff", "init_module", "delete_module", "finit_module", "kexec_load"), _DENIED),
    **dict.fromkeys(("iopl", "ioperm", "vhangup", "quotactl", "syslog", "bpf", "perf_event_open"), _DENIED),
    **dict.fromkeys(("lookup_dcookie", "open_by_handle_at", "adjtimex", "clock_adjtime"), _DENIED),
    **dict.fromkeys(("kexec_file_load", "move_pages", "io_uring_enter"), _DENIED),
    **dict.fromkeys(("io_setup", "io_submit", "io_getevents", "io_pgetevents", "io_cancel", "io_destroy"), _ARGUMENTS),
    # These two are there, and look at their arguments: rings and a boot log of gVisor's own.
    "io_uring_setup": {errno.EFAULT},
    "syslog": {errno.EFAULT, errno.EPERM},
    "name_to_handle_at": {errno.EOPNOTSUPP},
    "open_by_handle_at": {errno.EOPNOTSUPP, errno.EPERM},
    "bpf": {errno.EPERM},
    "perf_event_open": {errno.ENODEV, errno.EPERM},
    "fanotify_init": {errno.EPERM, errno.ENOSYS},
    "modify_ldt": {errno.EPERM},
    "personality": {errno.EINVAL},
    "kcmp": {errno.EPERM},
    "sysfs": {errno.ENOSYS},
}
GVISOR_OWN = "clone3"
"""C libraries use it for threads, and no filter sees its flags: namespaces of gVisor's own kernel may be made with it.
What can be done in them is tried in test_mounting.py."""


@pytest.mark.parametrize("user", ["user", "root"])
async def test_dangerous_system_calls_do_not_exist(prey: Sandbox, runtime_name: RuntimeName, user: str) -> None:
    found = await attempts(prey, "system-calls", user=user)
    assert len(found) > 60
    if runtime_name != "runsc":
        assert not unexpected(found, ABSENT)
        return
    answers = {name: error for name, error in found.items() if name != GVISOR_OWN}
    wrong = {
        name: errno.errorcode.get(error, str(error))
        for name, error in answers.items()
        if error not in ABSENT and error not in GVISOR.get(name.partition(":")[0], set())
    }
    assert not wrong


@pytest.mark.parametrize("abi", ["int80", "x32"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one way to call the kernel")
async def test_the_filter_cannot_be_passed_by_another_way_to_call_the_kernel(
    prey: Sandbox, runtime_name: RuntimeName, abi: str
) -> None:
    """32-bit calls have other numbers: a filter that did not look would let `mount` pass for something else."""
    said = await probe(prey, "abi", abi)
    if said.ok:
        # A call that was answered was answered with an error. gVisor knows no such calls.
        assert int(said.stdout) < 0
    else:
        assert said.signal in {31, 11, 9}, said


async def test_a_filter_of_ones_own_cannot_loosen_the_sandboxs(prey: Sandbox, runtime_name: RuntimeName) -> None:
    code = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
program = ctypes.create_string_buffer(struct.pack('<HBBI', 6, 0, 0, 0x7fff0000))
class Fprog(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('filter', ctypes.c_void_p)]
prog = Fprog(1, ctypes.addressof(program))
print(libc.prctl(22, 2, ctypes.byref(prog)))
print(libc.mount(b'none', b'/mnt', b'tmpfs', 0, b''), ctypes.get_errno())
"""
    said = await prey.exec(["python3", "-I", "-S", "-c", code], user="root", timeout_s=20)
    loaded, mounted = said.stdout.splitlines()
    assert loaded == "0"
    assert mounted in ({"-1 38"} if runtime_name != "runsc" else {"-1 38", "-1 1"})
