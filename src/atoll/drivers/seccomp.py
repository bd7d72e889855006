"""Which system calls a sandbox may make. An allowlist: every other call fails with ENOSYS.

Owns the list, and the program for the kernel that it compiles to. Not here: loading it, which the runtime does.

Left out on purpose, apart from what only root of the machine may do anyway: making and joining namespaces, mounting,
`bpf`, `perf_event_open`, `userfaultfd`, `io_uring_*`, kernel keyrings, file handles, `pidfd_getfd`, `kcmp`, and
sockets of other families than Unix, IPv4, IPv6 and netlink (pairs: Unix alone). Each has been a way out of a container
before. `io_setup` and its kin are left out because all of the machine shares one pool of them (`fs.aio-max-nr`).

crun would compile the list for each container, which takes a third of a start. `compiled` does that once, with the same
libseccomp; crun and bubblewrap take the result. gVisor, whose kernel has few of these calls, gets `denials` instead.
"""

from __future__ import annotations

import errno
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

_FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr
fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr getxattrat inotify_add_watch
inotify_init inotify_init1 inotify_rm_watch ioctl lchown lgetxattr link linkat listxattr listxattrat llistxattr
lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open openat openat2 pread64 preadv preadv2
pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr removexattrat rename renameat renameat2
rmdir sendfile setxattr setxattrat splice stat statfs statx symlink symlinkat sync sync_file_range syncfs tee truncate
umask unlink unlinkat utime utimensat utimes vmsplice write writev
"""
_MEMORY = """
brk cachestat get_mempolicy madvise mbind membarrier memfd_create migrate_pages mincore mlock mlock2 mlockall mmap
mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect remap_file_pages
process_madvise process_mrelease set_mempolicy set_mempolicy_home_node
"""
_PROCESSES = """
arch_prctl capget capset chroot execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv
futex_wake get_robust_list get_thread_area getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid
getpriority getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill
landlock_add_rule landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prctl prlimit64
process_vm_readv process_vm_writev ptrace restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp set_robust_list
set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setpgid setpriority setregid setresgid setresuid
setreuid setrlimit setsid setuid sigaltstack signalfd signalfd4 tgkill tkill vfork wait4 waitid
"""
_TIME = """
alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep setitimer time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times
"""
_COMMUNICATION = """
accept accept4 bind connect epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
epoll_wait_old eventfd eventfd2 getpeername getsockname getsockopt listen mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd pipe pipe2 poll ppoll pselect6 recvfrom recvmmsg
recvmsg select semctl semget semop semtimedop sendmmsg sendmsg sendto setsockopt shmat shmctl shmdt shmget shutdown
"""
_SYSTEM = "getrandom sysinfo uname sethostname setdomainname map_shadow_stack uretprobe"

_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} and CLONE_NEWTIME."""
_NAMESPACE_FLAGS = {"clone": _NEW_NAMESPACES & ~0xFF, "unshare": _NEW_NAMESPACES}
"""The lowest byte of clone's flags is a signal number, so CLONE_NEWTIME only exists for unshare."""
_DENIED = "add_key keyctl mount pivot_root request_key setns umount2"
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
_AF_UNIX = 1
_FAMILIES = (_AF_UNIX, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""


_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OPERATORS = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
_OPTIMIZE, _BINARY_TREE = 8, 2


def profile() -> dict[str, Any]:
    """The `linux.seccomp` part of an OCI configuration."""
    names = (_FILES + _MEMORY + _PROCESSES + _TIME + _COMMUNICATION + _SYSTEM).split()

    def allow(name: str, *args: dict[str, Any]) -> dict[str, Any]:
        return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(args)}

    def equals(index: int, value: int) -> dict[str, Any]:
        return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}

    def none_of(index: int, bits: int) -> dict[str, Any]:
        return {"index": index, "value": bits, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}

    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": [
            {"names": names, "action": "SCMP_ACT_ALLOW"},
            *(allow(name, none_of(0, flags)) for name, flags in _NAMESPACE_FLAGS.items()),
            *(allow("personality", equals(0, value)) for value in _PERSONALITIES),
            *(allow("socket", equals(0, family)) for family in _FAMILIES),
            allow("socketpair", equals(0, _AF_UNIX)),
        ],
    }


def denials() -> dict[str, Any]:
    """The `linux.seccomp` part for gVisor, whose own kernel interprets it for each system call: a few that fail.

    In a namespace of its own a process has all capabilities, and reaches far more of gVisor's kernel; so namespaces,
    mounts and keyrings are refused here too. The whole of `profile` would add 14 µs to a system call that takes 17.
    gVisor answers EPERM, whatever the profile says. So `clone3` is not refused, although no filter can see its flags: C
    libraries use it for threads, and do without it for ENOSYS alone.
    """
    denied = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}

    def has(bit: int) -> list[dict[str, Any]]:
        return [{"index": 0, "value": bit, "valueTwo": bit, "op": "SCMP_CMP_MASKED_EQ"}]

    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": [
            {"names": _DENIED.split(), **denied},
            *(
                {"names": [name], "args": has(1 << shift), **denied}
                for name, flags in _NAMESPACE_FLAGS.items()
                for shift in range(32)
                if flags >> shift & 1
            ),
        ],
    }


def compiled(directory: Path) -> bytes | None:
    """The profile as a program for the kernel, cached in `directory`. None: libseccomp cannot be used here."""
    path = directory / f"seccomp-{_digest()}.bpf"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        program = _compile(profile())
    if program is not None:
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(program)
        temporary.rename(path)
    return program


@cache
def _digest() -> str:
    import hashlib

    return hashlib.sha256(json.dumps(profile()).encode() + os.uname().machine.encode()).hexdigest()[:16]


def _compile(wanted: dict[str, Any]) -> bytes | None:
    import ctypes
    import tempfile

    class _Comparison(ctypes.Structure):
        _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]

    try:
        lib = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    lib.seccomp_init.restype = ctypes.c_void_p
    made = lib.seccomp_init(ctypes.c_uint32(_ERRNO | wanted["defaultErrnoRet"]))
    if not made:
        return None
    context = ctypes.c_void_p(made)
    try:
        lib.seccomp_attr_set(context, _OPTIMIZE, ctypes.c_uint32(_BINARY_TREE))
        for rule in wanted["syscalls"]:
            arguments = [
                _Comparison(arg["index"], _OPERATORS[arg["op"]], arg["value"], arg.get("valueTwo", 0))
                for arg in rule.get("args", ())
            ]
            array = (_Comparison * len(arguments))(*arguments)
            for name in rule["names"]:
                number = lib.seccomp_syscall_resolve_name(name.encode())
                # Negative: this machine's architecture, or its libseccomp, does not have it.
                if number >= 0 and lib.seccomp_rule_add_array(
                    context, ctypes.c_uint32(_ALLOW), number, len(arguments), array
                ):
                    return None
        with tempfile.TemporaryFile() as file:
            if lib.seccomp_export_bpf(context, file.fileno()):
                return None
            file.seek(0)
            return file.read()
    finally:
        lib.seccomp_release(context)
