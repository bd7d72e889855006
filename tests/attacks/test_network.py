"""Reaching the network: the host's loopback, another sandbox, raw packets, netlink, sockets that are no network."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Iterator

import pytest

from atoll.contract.errors import AtollError
from atoll.contract.model import RuntimeName
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import ABSENT, PROBE, attempts, python, running, shell, unexpected

_CONNECT = """
import socket, sys
for address in sys.argv[2:]:
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    with socket.socket(family) as s:
        s.settimeout(2)
        try:
            s.connect((address, int(sys.argv[1])))
            print('connected', address, s.recv(64))
        except OSError:
            pass
"""


@pytest.fixture
def host_listener() -> Iterator[socket.socket]:
    """A server of the host's that says something to whoever connects, on IPv4 and IPv6 loopback."""
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
        server.listen(8)
        server.settimeout(0)
        yield server


def _own_addresses() -> list[str]:
    """Addresses of this machine. Nothing is sent: connecting a UDP socket only looks up a route."""
    addresses = ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::ffff:127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probing:
        try:
            probing.connect(("192.0.2.1", 9))
            addresses.append(probing.getsockname()[0])
        except OSError:
            pass
    return addresses


@pytest.mark.parametrize("user", ["user", "root"])
async def test_servers_of_the_host_cannot_be_reached(prey: Sandbox, host_listener: socket.socket, user: str) -> None:
    port = host_listener.getsockname()[1]
    said = await python(prey, _CONNECT, str(port), *_own_addresses(), user=user)
    assert said.ok, said.stderr
    assert said.stdout == ""
    with pytest.raises(BlockingIOError):
        host_listener.accept()


async def test_servers_of_another_sandbox_cannot_be_reached(prey: Sandbox, bystander: Sandbox) -> None:
    serve = "import socket; s = socket.create_server(('0.0.0.0', 7777)); print('up', flush=True); s.accept()"
    async with running(bystander, "python3", "-I", "-S", "-c", serve):
        said = await python(prey, _CONNECT, "7777", "127.0.0.1", "0.0.0.0", "::1")
        assert said.ok, said.stderr
        assert said.stdout == ""


async def test_the_only_interface_is_loopback_and_there_is_no_route(prey: Sandbox) -> None:
    said = await shell(prey, "cat /proc/net/dev; echo =; cat /proc/net/route /proc/net/arp", user="root")
    devices, _, routes = said.stdout.partition("=")
    names = {line.split(":")[0].strip() for line in devices.splitlines() if ":" in line}
    # gVisor lists what the kernel would make by itself; none of it is up.
    assert names <= {"lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6gre0"}
    assert "lo" in names
    assert len(routes.strip().splitlines()) <= 2, "headers at most"


async def test_datagrams_leave_by_no_way(prey: Sandbox) -> None:
    """To addresses of documentation, which exist nowhere: even asking for a route fails. Nothing is sent."""
    code = """
import socket
for address in ('192.0.2.1', '2001:db8::1', '255.255.255.255'):
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    s = socket.socket(family, socket.SOCK_DGRAM)
    try:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        s.connect((address, 9))
        print('there is a way to', address)
    except OSError:
        pass
"""
    said = await python(prey, code, user="root")
    assert said.ok, said.stderr
    assert said.stdout == ""


@pytest.mark.parametrize("user", ["user", "root"])
async def test_sockets_of_other_kinds_do_not_exist(prey: Sandbox, runtime_name: RuntimeName, user: str) -> None:
    """Packets, VM sockets, the kernel's cryptography and the rest. Some have led into the kernel before."""
    found = await attempts(prey, "sockets", user=user)
    raw = {name: found.pop(name) for name in ("raw4", "raw6")}
    assert all(error in {errno.EPERM, errno.EACCES} for error in raw.values()), raw
    absent = {errno.ENOSYS, errno.EPERM}
    if runtime_name == "runsc":
        absent |= {errno.EAFNOSUPPORT, errno.EACCES, errno.ESOCKTNOSUPPORT, errno.EPROTONOSUPPORT}
    granted = {name: error for name, error in found.items() if error not in absent}
    assert not granted


@pytest.mark.parametrize("user", ["user", "root"])
async def test_pairs_of_sockets_are_unix_sockets_and_nothing_else(
    prey: Sandbox, runtime_name: RuntimeName, user: str
) -> None:
    found = await attempts(prey, "socket-pairs", user=user)
    unix = {name: found.pop(name) for name in list(found) if name.startswith("1:")}
    assert [unix["1:1"], unix["1:2"], unix["1:5"]] == [0, 0, 0]
    if runtime_name == "runsc":
        assert 0 not in found.values()  # gVisor's own answers, none of the host's kernel
    else:
        assert not unexpected(found, ABSENT)


@pytest.mark.parametrize("user", ["user", "root"])
async def test_netlink_changes_nothing(prey: Sandbox, user: str) -> None:
    code = """
import socket, struct
def ask(kind, flags, body):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    s.settimeout(5)
    s.send(struct.pack('=IHHII', 16 + len(body), kind, flags | 1 | 4, 1, 0) + body)
    answer = s.recv(65536)
    error = -struct.unpack_from('=i', answer, 16)[0] if struct.unpack_from('=H', answer, 4)[0] == 2 else 0
    if error == 0: print('granted', kind)
link = struct.pack('=BxHiII', 0, 1, 9, 1, 1) + struct.pack('=HH8s', 12, 3, b'atoll0')
address = struct.pack('=BBBBI', 2, 24, 0, 0, 1) + struct.pack('=HH4s', 8, 2, bytes([10, 9, 8, 7]))
route = struct.pack('=BBBBBBBBI', 2, 0, 0, 0, 254, 3, 0, 1, 0)
for kind, body in ((16, link), (20, address), (24, route)):
    try: ask(kind, 0x400, body)
    except OSError: pass
for protocol in range(1, 23):
    try:
        s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        s.bind((0, 0xffffffff))
        if protocol in (2, 9, 12, 15): print('listening to', protocol)
    except OSError: pass
"""
    said = await python(prey, code, user=user)
    assert said.ok, said.stderr
    # Listening to device events (15) shows those of the sandbox's own namespace: there are none.
    assert set(said.stdout.splitlines()) <= {"listening to 15", "listening to 12"}


async def test_abstract_sockets_of_the_host_and_the_neighbour_cannot_be_reached(
    prey: Sandbox, bystander: Sandbox, probe_program: bytes
) -> None:
    name = f"atoll-attack-{secrets.token_hex(4)}"
    await bystander.files.write_bytes(PROBE, probe_program, mode=0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen(1)
        found = await attempts(prey, "join-abstract", name, user="root")
        assert found == {"connect": errno.ECONNREFUSED}
    async with running(bystander, PROBE, "hold-abstract", f"{name}-2") as (_, said):
        assert said == "bind 0"
        found = await attempts(prey, "join-abstract", f"{name}-2", user="root")
        assert found == {"connect": errno.ECONNREFUSED}


async def test_shared_memory_queues_and_semaphores_are_the_sandboxs_own(prey: Sandbox, bystander: Sandbox) -> None:
    code = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
made = sys.argv[1] == 'make'
key = 0x41746f6c
flags = 0o666 | (0o1000 if made else 0)
print([libc.shmget(key, 4096, flags) >= 0, libc.semget(key, 1, flags) >= 0])
"""
    assert (await python(bystander, code, "make")).stdout == "[True, True]\n"
    assert (await python(prey, code, "find", user="root")).stdout == "[False, False]\n"


async def test_the_host_dials_nothing_but_loopback(prey: Sandbox, host_listener: socket.socket) -> None:
    """`dial` is for the sandbox's own servers: it names no other machine, and the host's own is another one."""
    port = host_listener.getsockname()[1]
    with pytest.raises(AtollError):
        await prey.dial(port)
    for host in ("192.0.2.1", "localhost", "0.0.0.0", "::", "127.0.0.2", "example.com", "/run/x"):
        with pytest.raises(AtollError):
            await prey.dial(port, host)
    with pytest.raises(BlockingIOError):
        host_listener.accept()


async def test_a_file_socket_of_the_host_is_not_there(prey: Sandbox) -> None:
    paths = ["/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd"]
    said = await shell(
        prey, "for p in " + " ".join(paths) + "; do [ -e $p ] && echo $p; done; find /run -type s", user="root"
    )
    assert said.stdout == ""
