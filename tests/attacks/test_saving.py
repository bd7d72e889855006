"""Every kind of thing that a process can hold, over sleep and checkpoint with gVisor: it works afterwards as before.

Each kind in a process of its own. What is refused instead, before anything is lost, is in `test_held.py` of the
conformance suite, with the kinds that share one process; both run with any version of gVisor.
"""

from __future__ import annotations

import json

import anyio
import pytest

from atoll.runtime.interface import Engine
from atoll.testing.conformance.test_held import hold
from atoll.testing.waiting import eventually

pytestmark = pytest.mark.runtimes("runsc")

GROUPS = 8
KINDS: dict[str, str] = {
    "abstract Unix socket": (
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0abs'); s.listen(); c = "
        "socket.socket(socket.AF_UNIX); c.connect('\\0abs'); c.send(b'kept'); check = "
        "'s.accept()[0].recv(4)'"
    ),
    "datagram Unix socket": ("a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.send(b'kept'); check = 'b.recv(4)'"),
    "bound datagram Unix socket": (
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.bind('dsock'); c = "
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); c.sendto(b'kept', 'dsock'); check = 's.recv(4) "
        'and c.sendto(b"kept", "dsock") and s.recv(4)\''
    ),
    "seqpacket socket": ("a, b = socket.socketpair(type=socket.SOCK_SEQPACKET); a.send(b'kept'); check = 'b.recv(4)'"),
    "Unix socket with a file": (
        "s = socket.socket(socket.AF_UNIX); s.bind('fsock'); s.listen(); check = '(c := "
        'socket.socket(socket.AF_UNIX)).connect("fsock") or s.accept()\''
    ),
    "Unix socket on a tmpfs": (
        "s = socket.socket(socket.AF_UNIX); s.bind('/tmp/tsock'); s.listen(); check = '(c := "
        'socket.socket(socket.AF_UNIX)).connect("/tmp/tsock") or s.accept()\''
    ),
    "descriptor in flight": (
        "a, b = socket.socketpair(); f = file('inflight'); socket.send_fds(a, [b'x'], [f]); os.close(f); "
        "check = 'os.pread(socket.recv_fds(b, 1, 1)[1][0], 4, 0) == b\"kept\"'"
    ),
    "pipe in flight": (
        "a, b = socket.socketpair(); r, w = os.pipe(); socket.send_fds(a, [b'x'], [r]); os.close(r); check "
        '= \'os.write(w, b"kept") and os.read(socket.recv_fds(b, 1, 1)[1][0], 4) == b"kept"\''
    ),
    "deleted file on a tmpfs in flight": (
        "a, b = socket.socketpair(); f = file('/tmp/inflight'); os.unlink('/tmp/inflight'); "
        "socket.send_fds(a, [b'x'], [f]); os.close(f); check = 'os.pread(socket.recv_fds(b, 1, 1)[1][0], "
        '4, 0) == b"kept"\''
    ),
    "epoll of a datagram Unix socket": (
        "a, b = socket.socketpair(type=socket.SOCK_DGRAM); e = select.epoll(); e.register(b, 1); check = "
        "'a.send(b\"x\") and e.poll(5)'"
    ),
    "epoll of a Unix socket": (
        "a, b = socket.socketpair(); e = select.epoll(); e.register(b, 1); check = 'a.send(b\"x\") and e.poll(5)'"
    ),
    "epoll of a listening Unix socket": (
        "s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + 'ep'); s.listen(); e = select.epoll(); "
        'e.register(s, 1); check = \'(c := socket.socket(socket.AF_UNIX)).connect(chr(0) + "ep") or '
        "e.poll(5)'"
    ),
    "epoll of a timerfd": (
        "t = made(libc.timerfd_create(1, 0)); made(libc.timerfd_settime(t, 0, struct.pack('qqqq', 0, 1000, "
        "0, 1000), None)); e = select.epoll(); e.register(t, 1); check = 'e.poll(5)'"
    ),
    "epoll of an eventfd": (
        "v = os.eventfd(0); e = select.epoll(); e.register(v, 1 | 1 << 31); check = 'os.eventfd_write(v, "
        "1) or e.poll(5)'"
    ),
    "epoll of an epoll": (
        "r, w = os.pipe(); e = select.epoll(); e.register(r, 1); f = select.epoll(); "
        "f.register(e.fileno(), 1); check = 'os.write(w, b\"x\") and f.poll(5)'"
    ),
    "epoll of an inotify": (
        "i = made(libc.inotify_init()); os.mkdir('seen2'); made(libc.inotify_add_watch(i, b'seen2', "
        "0x100)); e = select.epoll(); e.register(i, 1); check = 'os.mkdir(\"seen2/x\") or e.poll(5)'"
    ),
    "epoll of a terminal": (
        "m, s = os.openpty(); e = select.epoll(); e.register(s, 1); check = 'os.write(m, bytes([120, 10])) "
        "and e.poll(5)'"
    ),
    "thread in epoll_wait": (
        "r, w = os.pipe(); e = select.epoll(); e.register(r, 1); t = threading.Thread(target=e.poll, "
        "daemon=True); t.start(); check = 'os.write(w, b\"x\") and (t.join(5) or not t.is_alive())'"
    ),
    "thread in poll": (
        "r, w = os.pipe(); p = select.poll(); p.register(r, 1); t = threading.Thread(target=p.poll, "
        "daemon=True); t.start(); check = 'os.write(w, b\"x\") and (t.join(5) or not t.is_alive())'"
    ),
    "thread that reads a pipe": (
        "r, w = os.pipe(); t = threading.Thread(target=os.read, args=(r, 1), daemon=True); t.start(); "
        "check = 'os.write(w, b\"x\") and (t.join(5) or not t.is_alive())'"
    ),
    "thread that sleeps": (
        "t = threading.Thread(target=time.sleep, args=(2,), daemon=True); t.start(); check = 't.join(10) "
        "or not t.is_alive()'"
    ),
    "IPv6 listener": (
        "s = socket.create_server(('::1', 7102), family=socket.AF_INET6); check = "
        "'socket.create_connection((\"::1\", 7102))'"
    ),
    "connected UDP socket": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 7101)); c = "
        "socket.socket(type=socket.SOCK_DGRAM); c.connect(('127.0.0.1', 7101)); check = 'c.send(b\"x\") "
        "and s.recv(1)'"
    ),
    "TCP socket that is not connected": (
        "s = socket.socket(); s.bind(('127.0.0.1', 7103)); check = 's.listen() or "
        'socket.create_connection(("127.0.0.1", 7103))\''
    ),
    "TCP connection in the backlog": (
        "s = socket.create_server(('127.0.0.1', 7104)); c = socket.create_connection(('127.0.0.1', 7104)); "
        "c.send(b'kept'); check = 's.accept()[0].recv(4) == b\"kept\"'"
    ),
    "half-closed TCP connection": (
        "s = socket.create_server(('127.0.0.1', 7105)); c = socket.create_connection(('127.0.0.1', 7105)); "
        'a, _ = s.accept(); c.shutdown(1); check = \'a.recv(4) == b"" and a.send(b"x") and c.recv(1)\''
    ),
    "TCP connection closed on the other side": (
        "s = socket.create_server(('127.0.0.1', 7106)); c = socket.create_connection(('127.0.0.1', 7106)); "
        "a, _ = s.accept(); a.close(); check = 'c.recv(4) == b\"\"'"
    ),
    "TCP connection with much unread": (
        "s = socket.create_server(('127.0.0.1', 7107)); c = socket.create_connection(('127.0.0.1', 7107)); "
        "a, _ = s.accept(); c.setblocking(False); n = c.send(b'x' * 10_000_000); check = 'len(a.recv(n, "
        "socket.MSG_WAITALL)) == n'"
    ),
    "thread that accepts": (
        "s = socket.create_server(('127.0.0.1', 7108)); t = threading.Thread(target=s.accept, "
        'daemon=True); t.start(); time.sleep(.1); check = \'socket.create_connection(("127.0.0.1", 7108)) '
        "and (t.join(5) or not t.is_alive())'"
    ),
    "netlink socket": ("s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))"),
    "multicast": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.setsockopt(0, 35, socket.inet_aton('224.1.1.1') + "
        "socket.inet_aton('127.0.0.1'))"
    ),
    "session with a terminal": (
        "import pty; pid, m = pty.fork()\nif pid == 0: os.execvp('sh', ['sh'])\ntime.sleep(.3); check = "
        '\'os.write(m, b"echo kept$((1+1))\\\\n") and (time.sleep(1) or b"kept2" in os.read(m, 9999))\''
    ),
    "terminal whose session is gone": ("import pty; pid, m = pty.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)"),
    "terminal whose master is closed": ("m, s = os.openpty(); os.close(m)"),
    "record lock": ("f = file('rl'); fcntl.lockf(f, 2); check = 'os.pread(f, 4, 0) == b\"kept\"'"),
    "process that waits for a lock": (
        "f = file('wl'); fcntl.flock(f, 2); p = subprocess.Popen(['python3', '-c', 'import fcntl; f = "
        "open(\"wl\"); fcntl.flock(f, 2)']); time.sleep(.3); check = 'fcntl.flock(f, 8) or p.wait(10) == "
        "0'"
    ),
    "private mapping with changes": (
        "f = file('pm'); q = mmap.mmap(f, 4096, flags=2, prot=3); q[:4] = b'mine'; check = 'q[:4] == "
        'b"mine" and os.pread(f, 4, 0) == b"kept"\''
    ),
    "shared mapping of two processes": (
        "q = mmap.mmap(-1, 4096); p = os.fork()\nif p == 0:\n  while q[0] != 7: time.sleep(.05)\n  q[1] = "
        "8; os._exit(0)\ncheck = '(q.__setitem__(0, 7)) or os.waitpid(p, 0)[1] == 0 and q[1] == 8'"
    ),
    "mapped file that was truncated": ("f = file('tr'); q = mmap.mmap(f, 4096); os.truncate('tr', 0)"),
    "mapped file that was renamed": (
        "f = file('mr'); q = mmap.mmap(f, 4096); os.close(f); os.rename('mr', 'mr2'); check = 'q[:4] == b\"kept\"'"
    ),
    "mapped file of the image": (
        "f = os.open('/usr/bin/env', 0); q = mmap.mmap(f, 4096, prot=1); os.close(f); check = 'q[1:4] == b\"ELF\"'"
    ),
    "locked memory": (
        "q = mmap.mmap(-1, 4096); b = (ctypes.c_char * 4096).from_buffer(q); libc.mlock(b, "
        "ctypes.c_size_t(4096)); q[:4] = b'kept'; check = 'q[:4] == b\"kept\"'"
    ),
    "System V semaphore": (
        "s = made(libc.semget(0, 1, 0o1600)); made(libc.semctl(s, 0, 16, 5)); check = 'libc.semctl(s, 0, 12) == 5'"
    ),
    "System V message queue": (
        "s = made(libc.msgget(0, 0o1600)); made(libc.msgsnd(s, struct.pack('q4s', 1, b'kept'), "
        "ctypes.c_size_t(4), 0)); b = ctypes.create_string_buffer(64); check = 'libc.msgrcv(s, b, "
        "ctypes.c_size_t(50), 0, 0) == 4'"
    ),
    "shared robust mutex": (
        "q = mmap.mmap(-1, 4096); m = ctypes.addressof((ctypes.c_char * 64).from_buffer(q)); a = "
        "ctypes.create_string_buffer(64); libc.pthread_mutexattr_init(a); "
        "libc.pthread_mutexattr_setpshared(a, 1); libc.pthread_mutexattr_setrobust(a, 1); "
        "libc.pthread_mutex_init(ctypes.c_void_p(m), a); libc.pthread_mutex_lock(ctypes.c_void_p(m)); "
        "check = 'libc.pthread_mutex_unlock(ctypes.c_void_p(m)) == 0'"
    ),
    "asynchronous I/O context": ("c = ctypes.c_ulong(0); made(libc.syscall(206, 8, ctypes.byref(c)))"),
    "descriptor of a namespace": ("f = os.open('/proc/self/ns/net', 0)"),
    "directory of descriptors": ("f = os.open('/proc/self/fd', 0); check = 'os.listdir(f)'"),
    "memory of a process in /proc": (
        "f = os.open('/proc/self/mem', 0); check = 'os.pread(f, 4, "
        'ctypes.addressof(ctypes.create_string_buffer(b"kept")))\''
    ),
    "maps of a process in /proc": ("f = open('/proc/self/maps'); f.readline(); check = 'f.readline()'"),
    "path of a file": ("os.close(file('op')); f = os.open('op', os.O_PATH); check = 'os.fstat(f).st_size == 4096'"),
    "path of a symlink": (
        "os.symlink('nowhere', 'sl'); f = os.open('sl', os.O_PATH | os.O_NOFOLLOW); check = "
        '\'os.readlink("", dir_fd=f) == "nowhere"\''
    ),
    "path of a socket": (
        "s = socket.socket(socket.AF_UNIX); s.bind('ps'); f = os.open('ps', os.O_PATH); check = 'os.fstat(f)'"
    ),
    "open directory": (
        "os.mkdir('od'); os.close(file('od/x')); f = os.open('od', 0); check = 'os.listdir(f) == [\"x\"]'"
    ),
    "file in a renamed directory": (
        "os.mkdir('rd'); f = file('rd/x'); os.rename('rd', 'rd2'); check = 'os.pread(f, 4, 0) == b\"kept\"'"
    ),
    "working directory that was renamed": (
        "os.mkdir('cw'); os.chdir('cw'); os.rename('../cw', '../cw2'); check = 'os.getcwd().endswith(\"cw2\")'"
    ),
    "file that may no longer be opened": (
        "f = file('nm'); os.chmod('nm', 0); check = 'os.pread(f, 4, 0) == b\"kept\"'"
    ),
    "file of the image that was changed": (
        "f = os.open('/etc/passwd', os.O_RDWR | os.O_APPEND); os.write(f, b'# x\\n'); check = 'os.pread(f, 4, 0)'"
    ),
    "file of the image": ("f = os.open('/etc/group', 0); check = 'os.read(f, 4)'"),
    "file that was opened before it was changed": (
        "f = os.open('/etc/services', 0); os.close(os.open('/etc/services', os.O_WRONLY | os.O_APPEND)); "
        "check = 'os.read(f, 4)'"
    ),
    "file at an offset": ("f = file('at'); os.lseek(f, 2, 0); check = 'os.read(f, 2) == b\"pt\"'"),
    "file that is appended to": (
        "f = os.open('ap', os.O_CREAT | os.O_WRONLY | os.O_APPEND); os.write(f, b'a'); check = "
        '\'os.write(f, b"b") and open("ap").read() == "ab"\''
    ),
    "sparse file": (
        "f = os.open('sp', os.O_CREAT | os.O_RDWR); os.ftruncate(f, 1 << 40); check = 'os.fstat(f).st_size == 1 << 40'"
    ),
    "renamed FIFO": (
        "os.mkfifo('rf'); f = os.open('rf', os.O_RDWR); os.write(f, b'kept'); os.rename('rf', 'rf2'); "
        "check = 'os.read(f, 4)'"
    ),
    "devices": (
        "f = [os.open('/dev/' + n, os.O_RDWR) for n in ('null', 'zero', 'full', 'random', 'urandom')]; "
        "check = 'os.read(f[1], 4) == bytes(4)'"
    ),
    "limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (77, 77)); check = "
        "'resource.getrlimit(resource.RLIMIT_NOFILE) == (77, 77)'"
    ),
    "interval timer": (
        "hits = []; signal.signal(signal.SIGALRM, lambda *_: its['hits'].append(1)); "
        "signal.setitimer(signal.ITIMER_REAL, .2, .2); check = 'time.sleep(1) or hits'"
    ),
    "alarm": (
        "signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(31536000); check = 'signal.alarm(0) > 31000000'"
    ),
    "timer of a process": (
        "sev = struct.pack('qii48x', 0, 10, 0); got = []; signal.signal(10, lambda *_: "
        "its['got'].append(1)); t = ctypes.c_void_p(); made(libc.timer_create(1, sev, ctypes.byref(t))); "
        "made(libc.timer_settime(t, 0, struct.pack('qqqq', 0, 10**8, 0, 10**8), None)); check = "
        "'got.clear() or time.sleep(1) or got'"
    ),
    "traced process": (
        "p = subprocess.Popen(['sleep', '31536000']); made(libc.ptrace(16, p.pid, 0, 0)); "
        "os.waitpid(p.pid, 2); check = 'libc.ptrace(17, p.pid, 0, 0) == 0'"
    ),
    "zombie": ("p = subprocess.Popen(['true']); time.sleep(.3); check = 'p.wait(5) == 0'"),
    "orphan": ("subprocess.Popen(['sh', '-c', 'sleep 31536001 & exit']).wait()"),
    "seccomp filter": (
        "made(libc.prctl(38, 1, 0, 0, 0)); f = struct.pack('HBBI', 6, 0, 0, 0x7fff0000); b = "
        "ctypes.create_string_buffer(f); made(libc.prctl(22, 2, struct.pack('HxxxxxxQ', 1, "
        "ctypes.addressof(b)), 0, 0))"
    ),
    "blocked signal that is pending": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [10]); os.kill(os.getpid(), 10); check = 'signal.sigwait([10]) == 10'"
    ),
    "signal handler": (
        "got = []; signal.signal(12, lambda *_: its['got'].append(1)); check = 'os.kill(os.getpid(), 12) "
        "or time.sleep(.1) or got'"
    ),
    "child that waits for its parent": (
        "r, w = os.pipe(); p = os.fork()\nif p == 0: os.read(r, 1); os._exit(3)\ncheck = 'os.write(w, "
        'b"x") and os.waitpid(p, 0)[1] >> 8 == 3\''
    ),
    "pipe that is full": (
        "r, w = os.pipe(); os.set_blocking(w, False); n = os.write(w, b'x' * 10**6); check = 'len(os.read(r, n)) == n'"
    ),
    "writer that is held up": (
        "r, w = os.pipe(); t = threading.Thread(target=os.write, args=(w, b'x' * 100000), daemon=True); "
        "t.start(); time.sleep(.2); check = 'os.read(r, 50000) and (t.join(5) or not t.is_alive())'"
    ),
    "deleted file in /run": ("f = file('/run/x'); os.unlink('/run/x'); check = 'os.pread(f, 4, 0) == b\"kept\"'"),
    "deleted file in /dev": ("f = file('/dev/x'); os.unlink('/dev/x'); check = 'os.pread(f, 4, 0) == b\"kept\"'"),
    "closed standard output": ("p = subprocess.Popen(['sh', '-c', 'exec >&- 2>&- <&-; sleep 31536002'])"),
    "large memory": (
        "q = mmap.mmap(-1, 64 << 20); q[::4096] = b'x' * (len(q) // 4096); check = 'q[8192:8193] == b\"x\"'"
    ),
    "executable memory": ("q = mmap.mmap(-1, 4096, prot=7); q[0] = 195; check = 'q[0] == 195'"),
    "changed program name": (
        "libc.prctl(15, b'renamed'); check = 'open(\"/proc/self/comm\").read().strip() == \"renamed\"'"
    ),
    "changed root": (
        "os.mkdir('cr'); p = os.fork()\nif p == 0: os.chroot('cr'); time.sleep(31536003)\ntime.sleep(.2); "
        "check = 'os.waitpid(p, 1) == (0, 0)'"
    ),
    "sender that is held up": (
        "a, b = socket.socketpair(); t = threading.Thread(target=a.sendall, args=(b'x' * 5000000,), "
        "daemon=True); t.start(); time.sleep(.2); check = 'len(b.recv(5000000, socket.MSG_WAITALL)) == "
        "5000000'"
    ),
    "large deleted file on a tmpfs that is mapped": (
        "f = file('/tmp/big'); os.ftruncate(f, 8 << 20); q = mmap.mmap(f, 8 << 20); q[5 << 20] = 7; "
        "os.close(f); os.unlink('/tmp/big'); check = 'q[5 << 20] == 7'"
    ),
    "process in vfork": (
        "p = subprocess.Popen(['python3', '-c', 'import ctypes; ctypes.CDLL(None).vfork() or "
        "ctypes.CDLL(None).sleep(31536004)']); time.sleep(.3); check = 'p.poll() is None'"
    ),
    "file of a process whose first thread has ended": (
        "p = subprocess.Popen(['python3', '-c', 'import ctypes, os, threading, time; f = "
        'os.open("zk", 66); threading.Thread(target=lambda: time.sleep(31536000)).start(); '
        "ctypes.CDLL(None).syscall(60, 0)']); time.sleep(.7); check = 'p.poll() is None'"
    ),
    "file of a directory that was replaced by another": (
        "os.mkdir('h1'); f = file('h1/x'); os.rename('h1', 'h2'); os.mkdir('h1'); os.close(file('h1/x')); "
        "check = 'os.pread(f, 4, 0) == b\"kept\"'"
    ),
    "exchanged files": (
        "f = file('e1'); g = file('e2'); os.pwrite(g, b'else', 0); libc.renameat2(-100, b'e1', -100, "
        "b'e2', 2); check = 'os.pread(f, 4, 0) == b\"kept\" and os.pread(g, 4, 0) == b\"else\"'"
    ),
    "file without permission of its directory": (
        "os.mkdir('pd'); f = file('pd/x'); os.chmod('pd', 0); check = 'os.pread(f, 4, 0) == b\"kept\"'"
    ),
    "file of another user": (
        "f = file('au'); os.chown('au', 1234, 1234); os.chmod('au', 0); check = 'os.pread(f, 4, 0) == b\"kept\"'"
    ),
}
"""What holds it, in the words of `HOLDER`. Names of files are not used twice."""
NOT_EVERYWHERE: dict[str, str] = {
    "network namespace": (
        "made(libc.unshare(0x10000000 | 0x40000000)); open('/proc/self/uid_map', 'w').write('0 0 1'); "
        "open('/proc/self/setgroups', 'w').write('deny') if os.path.exists('/proc/self/setgroups') else 0; "
        "open('/proc/self/gid_map', 'w').write('0 0 1'); os.chdir('/root'); s = socket.socket(); "
        "s.bind(('127.0.0.1', 0)); s.listen()"
    ),
    "UTS namespace": (
        "made(libc.unshare(0x10000000 | 0x4000000)); open('/proc/self/uid_map', 'w').write('0 0 1'); "
        "open('/proc/self/setgroups', 'w').write('deny') if os.path.exists('/proc/self/setgroups') else 0; "
        "open('/proc/self/gid_map', 'w').write('0 0 1'); os.chdir('/root'); check = 'os.uname()'"
    ),
    "user and mount namespaces": (
        "made(libc.unshare(0x10000000 | 0x20000)); open('/proc/self/uid_map', 'w').write('0 0 1'); "
        "open('/proc/self/setgroups', 'w').write('deny') if os.path.exists('/proc/self/setgroups') else 0; "
        "open('/proc/self/gid_map', 'w').write('0 0 1'); os.chdir('/root'); check = "
        "'os.listdir(\"/\")'"
    ),
    "IPC namespace": (
        "made(libc.unshare(0x10000000 | 0x8000000)); open('/proc/self/uid_map', 'w').write('0 0 1'); "
        "open('/proc/self/setgroups', 'w').write('deny') if os.path.exists('/proc/self/setgroups') else 0; "
        "open('/proc/self/gid_map', 'w').write('0 0 1'); os.chdir('/root'); i = made(libc.shmget(0, 4096, "
        "0o1600)); libc.shmat.restype = ctypes.c_void_p; q = libc.shmat(i, None, 0); ctypes.memmove(q, "
        "b'kept', 4); check = 'ctypes.string_at(q, 4) == b\"kept\"'"
    ),
    "PID namespace": (
        "made(libc.unshare(0x10000000 | 0x20000000)); open('/proc/self/uid_map', 'w').write('0 0 1'); "
        "open('/proc/self/setgroups', 'w').write('deny') if os.path.exists('/proc/self/setgroups') else 0; "
        "open('/proc/self/gid_map', 'w').write('0 0 1'); os.chdir('/root'); p = subprocess.Popen(['sleep', "
        "'31536005']); check = 'p.poll() is None'"
    ),
    "ICMP socket": ("s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1)"),
    "open file description lock": (
        "f = file('ol'); fcntl.fcntl(f, 37, struct.pack('hhqqi4x', 1, 0, 0, 0, 0)); check = 'os.pread(f, "
        '4, 0) == b"kept"\''
    ),
    "lease": ("f = file('le'); fcntl.fcntl(f, 1024, 1)"),
    "pidfd": (
        "p = subprocess.Popen(['sleep', '31536000']); f = os.pidfd_open(p.pid); check = "
        "'signal.pidfd_send_signal(f, 9) or p.wait(5) == -9'"
    ),
    "pidfd of a dead process": ("p = subprocess.Popen(['true']); f = os.pidfd_open(p.pid); p.wait()"),
    "userfaultfd": ("f = made(libc.syscall(323, 1))"),
    "file without a name": (
        "f = os.open('/home/user', os.O_TMPFILE | os.O_RDWR, 0o600); os.write(f, b'kept'); check = "
        "'os.pread(f, 4, 0) == b\"kept\"'"
    ),
    "file without a name on a tmpfs": (
        "f = os.open('/tmp', os.O_TMPFILE | os.O_RDWR, 0o600); os.write(f, b'kept'); check = 'os.pread(f, "
        '4, 0) == b"kept"\''
    ),
    "fanotify": ("f = made(libc.fanotify_init(0, 0))"),
}
"""What some versions of gVisor do not have, and namespaces, which the filter of system calls refuses."""


@pytest.mark.parametrize("group", range(GROUPS))
async def test_what_a_process_holds_works_after_sleep_and_checkpoint(engine: Engine, group: int, as_root: None) -> None:
    kinds = list({**KINDS, **NOT_EVERYWHERE}.items())[group::GROUPS]
    async with await engine.create("holding") as sandbox:
        held = []

        async def take(number: int) -> None:
            kind, code = kinds[number]
            process = await hold(sandbox, {kind: code}, name=str(number))
            if process is None:
                assert kind in NOT_EVERYWHERE, f"{kind} cannot be made"
                return
            await process.detach()
            held.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(len(kinds)):
                tasks.start_soon(take, number)
        await sandbox.sleep()
        assert (await sandbox.exec("true")).ok
        await sandbox.checkpoint()
        for checkpoint in await sandbox.checkpoints():
            await engine.delete_checkpoint(checkpoint.id)
        await sandbox.files.write_text("/tmp/go", "", user="root")

        async def all_have_looked() -> bool:
            return all([await sandbox.files.exists(f"/tmp/done{number}") for number in held])

        await eventually(all_have_looked, "all have looked at what they hold", bound_s=30)
        lost = [json.loads(await sandbox.files.read_text(f"/tmp/done{number}")) for number in held]
        assert [each for each in lost if each] == []
