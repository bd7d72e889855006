"""The pytest plugin of the conformance suite: engines, sandboxes, the leak check, and the choice of runtimes.

The runtime is a parameter: a test that asks for `runtime_name`, or for a fixture made with it, runs once for each of
crun, runc and runsc, and in the files of `BWRAP_FILES` for bwrap; or for each `--atoll-runtime NAME` of the command
line. A runtime that cannot be used on this machine skips its tests. It fails them if it is named on the command line,
and with `ATOLL_STRICT=1` or `CI=true`. State directories belong to one test process, so several may run side by side.

Needs no setting of pytest and no other plugin than anyio's. Every asynchronous test of a run that loads this plugin is
cancelled after `TEST_BOUND_S`. On a slow machine, `ATOLL_TEST_SLOWNESS=20` makes all bounds twenty times as long.

Used by `atoll.testing.conformance` and by the tests of this repository. Not here: what tests do in sandboxes
(`inside.py`), how leaks are found (`leaks.py`).
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from atoll.testing import inside, leaks
from atoll.testing.leaks import Ledger, Snapshot
from atoll.testing.nursery import Nursery
from atoll.testing.waiting import SLOWNESS

if TYPE_CHECKING:
    # Imported where used: tests of single parts need not wait for the whole.
    from atoll import Capabilities, Engine, Sandbox, Settings
    from atoll.contract.model import RuntimeName
    from atoll.testing.serving import ServerProcess

RUNTIMES: tuple[RuntimeName, ...] = ("crun", "runc", "runsc", "bwrap")
"""The runtimes that tests run with when none is named."""
BWRAP_FILES = {
    "attacks": "bombs devices host_files keeper_confinement kernel_information killing_the_guest leaving_the_root "
    "malicious_images mounting mounts network proc_and_sys reaching_the_guest setuid system_calls traversal "
    "user_ids",
    "conformance": "checkpoints egress_once exec export files inside lifecycle limits mounts network processes "
    "sharing sleep storage units warm",
}
"""Where bwrap is tested too, unless it is named: what the driver, and not the guest alone, decides."""
STRICT = os.environ.get("ATOLL_STRICT") == "1" or os.environ.get("CI") == "true"
"""A runtime that is missing fails its tests instead of skipping them."""
TEST_BOUND_S = 60 * SLOWNESS

# The tests start Python some thousand times. Without bytecode on disk, each start would compile all of Atoll.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts background jobs with these signals ignored, and their children inherit that. The programs under test
# are started as from a terminal.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--atoll-runtime",
        action="append",
        metavar="NAME",
        help="run the tests of sandboxes with this runtime only; may be given several times",
    )
    parser.addoption(
        "--atoll-face",
        choices=["async", "sync", "remote"],
        default="async",
        help="which face of the API the engines of tests are: sync is the blocking one, remote is that of a server",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "core: also runs as an unprivileged user, with and without a range of user ids")
    config.addinivalue_line("markers", "rootless: runs as an unprivileged user only")
    config.addinivalue_line("markers", "cancels: cancels a call, which a blocking one cannot be by another task")
    config.addinivalue_line("markers", "local(reason): means nothing for the engine of a server")
    config.addinivalue_line("markers", "runtimes(*names): runs with these runtimes only; others would give the same")


def pytest_collection_finish() -> None:
    """Keep imported modules out of garbage collection: they live until the end."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    if os.geteuid() == 0 and item.get_closest_marker("rootless"):
        return True
    if item.config.getoption("atoll_face") == "sync" and item.get_closest_marker("cancels"):
        return True
    if item.config.getoption("atoll_face") == "remote" and item.get_closest_marker("local"):
        return True
    chosen = item.get_closest_marker("runtimes")
    callspec = getattr(item, "callspec", None)
    runtime = callspec.params.get("runtime_name") if callspec is not None else None
    files = BWRAP_FILES.get(item.path.parent.name, "").split()
    if runtime == "bwrap" and not item.config.getoption("atoll_runtime"):
        return item.path.stem.removeprefix("test_") not in files
    return chosen is not None and runtime not in chosen.args


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    its_own = {str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")}
    if "runtime_name" in metafunc.fixturenames and not any("runtime_name" in names for names in its_own):
        names = metafunc.config.getoption("atoll_runtime") or RUNTIMES
        metafunc.parametrize("runtime_name", names, indirect=True, scope="session")


def check_for_leaks(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Put the leak check around a test function, and let its clients be forked by the nursery.

    A `conftest.py` calls this in `pytest_pycollect_makeitem`, for the tests of its directory.
    """
    if collector.istestfunction(obj, name):
        pytest.mark.usefixtures("_preforked_clients", "leak_check")(obj)
        if inspect.iscoroutinefunction(obj):  # also where the setting `anyio_mode` is not `auto`
            pytest.mark.usefixtures("anyio_backend")(obj)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Bound every asynchronous test: a test that hangs is cancelled and fails, and the tests after it run."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return

    @functools.wraps(test)
    async def bounded(**arguments: object) -> None:
        with anyio.fail_after(TEST_BOUND_S):
            await test(**arguments)

    pyfuncitem.obj = bounded


# ---------------------------------------------------------------------------------------------------- state directories


@pytest.fixture(scope="session")
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.close()


@pytest.fixture(scope="session")
def host_images(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image store that holds the host image, built once for all processes of a run and cached for the next run."""
    from atoll.runtime.images.store import ImageStore

    if (cache := getattr(pytestconfig, "cache", None)) is not None:
        root: Path = cache.mkdir("host-images")
    else:
        root = tmp_path_factory.getbasetemp() / "host-images"
    anyio.run(ImageStore(root, rootless=os.geteuid() != 0).resolve, "host")
    return root


@pytest.fixture(scope="session")
def give_host_image(host_images: Path) -> Callable[[Path], Path]:
    """Gives a new state directory the host image, and returns it.

    Otherwise the first sandbox of each would wait until some 15,000 directories are created, and the end of the test
    until they are removed.
    """

    def give(state_dir: Path) -> Path:
        images = state_dir / "images"
        (images / "unpacked").mkdir(mode=0o700, parents=True)
        shutil.copy(host_images / "host.json", images)
        for tree in (host_images / "unpacked").iterdir():
            (images / "unpacked" / tree.name).symlink_to(tree)
        return state_dir

    return give


@pytest.fixture(scope="session")
def make_state_dir(ledger: Ledger, give_host_image: Callable[[Path], Path]) -> Iterator[Callable[[], Path]]:
    """Makes state directories that the leak check watches. At the end each must be free of sandboxes."""
    made: list[Path] = []

    def make() -> Path:
        path = Path(tempfile.mkdtemp(prefix="atoll-test-"))
        made.append(path)
        ledger.watch(path)
        return give_host_image(path)

    yield make
    left = [line for path in made for line in ledger.all_of(path)]
    for path in made:
        ledger.end_processes_of(path)
        ledger.unwatch(path)
        shutil.rmtree(path, ignore_errors=bool(left))
        for kept in ("key", "log"):  # of servers (`RunningServer`)
            path.with_name(f"{path.name}.{kept}").unlink(missing_ok=True)
    if left:
        shown = [*left[:20], f"and {len(left) - 20} more"] if len(left) > 20 else left
        pytest.fail("leaked by the tests of this process:\n  " + "\n  ".join(shown), pytrace=False)


@pytest.fixture(scope="session")
def state_dir(make_state_dir: Callable[[], Path]) -> Path:
    """The state directory of this test process. It has the host image; each module finds it without sandboxes."""
    return make_state_dir()


@pytest.fixture(scope="session")
def any_settings(pytestconfig: pytest.Config) -> Settings:
    """For tests that would give the same with every runtime: the first that is named, or the fastest."""
    from atoll import Settings

    named = pytestconfig.getoption("atoll_runtime")
    return Settings(runtime=named[0]) if named else Settings()


@pytest.fixture(scope="module")
async def host(state_dir: Path, any_settings: Settings) -> AsyncIterator[Engine]:
    """An open engine with `any_settings`."""
    import atoll

    async with atoll.open(state_dir, settings=any_settings) as engine:
        yield engine


# ------------------------------------------------------------------------------------------------------ other processes


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Forks the programs that tests start, so that they need not import Atoll each time."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def _preforked_clients(nursery: Nursery) -> None:
    """Clients (`inside.client`) are forked by the nursery."""
    inside.python = nursery.program


# ------------------------------------------------------------------------------------------------------------ sandboxes


@pytest.fixture(scope="session")
def runtime_name(request: pytest.FixtureRequest, state_dir: Path) -> RuntimeName:
    """Each runtime in turn."""
    from atoll.drivers import registry

    name: RuntimeName = request.param
    usable = registry.available(state_dir)
    if name not in usable:
        message = f"{name} cannot be used on this machine, only {', '.join(usable)}; 'atoll doctor' says why"
        if STRICT or request.config.getoption("atoll_runtime"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return name


@pytest.fixture(scope="session")
def servers(make_state_dir: Callable[[], Path]) -> Iterator[Callable[[Path], ServerProcess]]:
    """Gives the server of a state directory, which is started when it is first asked for."""
    from atoll.testing.serving import ServerProcess

    started: dict[Path, ServerProcess] = {}

    def server(state_dir: Path) -> ServerProcess:
        if state_dir not in started:
            started[state_dir] = ServerProcess(state_dir)
            leaks.POOLED_PORTS.add(started[state_dir].port)
        return started[state_dir]

    yield server
    for each in started.values():
        each.close()


def _opened(
    request: pytest.FixtureRequest, state_dir: Path, settings: Settings
) -> AbstractAsyncContextManager[Engine, bool | None]:
    face = request.config.getoption("atoll_face")
    if face == "async":
        import atoll

        return atoll.open(state_dir, settings=settings)
    if face == "remote":
        from atoll.client.engine import connect

        server = request.getfixturevalue("servers")(state_dir)
        return connect(server.url, server.key, settings=settings.model_copy(update={"state_dir": state_dir}))
    import atoll.sync
    from atoll.testing.unblocking import Unblocking

    return Unblocking(atoll.sync.open(state_dir, settings=settings))


@pytest.fixture(scope="module")
async def engine(request: pytest.FixtureRequest, runtime_name: RuntimeName, state_dir: Path) -> AsyncIterator[Engine]:
    """An open engine that creates sandboxes with `runtime_name` unless they name another."""
    import atoll

    async with _opened(request, state_dir, atoll.Settings(runtime=runtime_name)) as engine:
        yield engine
        # A test that failed half-way must not fail the tests after it. A test that leaked has failed already.
        for info in await engine.list():
            with suppress(LookupError):
                await engine.destroy(info.name)
        await engine.remove_abandoned()


@pytest.fixture(scope="module")
async def shared(engine: Engine) -> AsyncIterator[Sandbox]:
    """One sandbox for all tests of a module that restore what they change in it."""
    async with await engine.create() as sandbox:
        yield sandbox


@pytest.fixture
async def sandbox(engine: Engine) -> AsyncIterator[Sandbox]:
    """A fresh sandbox. The test may destroy or break it."""
    async for fresh in _fresh(engine):
        yield fresh


@pytest.fixture
async def neighbour(engine: Engine) -> AsyncIterator[Sandbox]:
    """A second fresh sandbox of the same runtime."""
    async for fresh in _fresh(engine):
        yield fresh


async def _fresh(engine: Engine) -> AsyncIterator[Sandbox]:
    sandbox = await engine.create()
    yield sandbox
    with suppress(LookupError):
        await engine.destroy(sandbox.name)


# ---------------------------------------------------------------------------------------------------------------- leaks


class LeakCheck:
    """Compares the machine with what it was when the test began."""

    def __init__(self, ledger: Ledger, before: Snapshot) -> None:
        self._ledger = ledger
        self._before = before

    async def back_to_start(self) -> None:
        """Wait until the machine is as it was, within a bound.

        Raises:
            AssertionError: it is not; the message lists what was added (+) and what is missing (-).
        """
        lines = await self._ledger.settled(self._before)
        assert not lines, "leaked (+) or lost (-) by this test:\n  " + "\n  ".join(lines)


@pytest.fixture
async def leak_check(anyio_backend: str, ledger: Ledger) -> AsyncIterator[LeakCheck]:
    """Fails the test that leaves a process, a mount, a cgroup, a directory or a descriptor behind.

    Set up after the sandboxes of the module and before those of the test, so that only the latter have to be gone.
    """
    check = LeakCheck(ledger, ledger.look())
    yield check
    await check.back_to_start()


# ------------------------------------------------------------------------------------------------------ the environment


@pytest.fixture
def capabilities(engine: Engine, runtime_name: RuntimeName) -> Capabilities:
    return engine.runtimes()[runtime_name]


@pytest.fixture(scope="session")
def single_id() -> bool:
    """Whether all users inside share one host id: an unprivileged user without a range in /etc/subuid has only one."""
    from atoll.drivers.machine import read_machine

    machine = read_machine()
    return not machine.root and not (machine.subuids and machine.subgids)


@pytest.fixture(scope="session")
def user_id(single_id: bool) -> int:
    """The uid of `user` inside."""
    return 0 if single_id else 1000


@pytest.fixture
def as_root() -> None:
    """For tests that need root on the host."""
    if os.geteuid() != 0:
        pytest.skip("needs root on the host")


@pytest.fixture
def can_freeze(capabilities: Capabilities, runtime_name: RuntimeName) -> None:
    """For tests of what needs a freezer: to pause, and to copy a sandbox while it runs."""
    if not capabilities.freeze:
        pytest.skip(f"{runtime_name} declares that it cannot freeze a sandbox here")


@pytest.fixture
def can_limit(capabilities: Capabilities, runtime_name: RuntimeName) -> None:
    """For tests of limits on memory and CPU time, and of what is counted with them."""
    if not capabilities.memory_limit:
        pytest.skip(f"{runtime_name} declares that it cannot limit memory here")


@pytest.fixture
async def here(shared: Sandbox, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A directory for this test in the shared sandbox, relative to the user's home."""
    name = f"test-{zlib.crc32(request.node.name.encode())}"
    await shared.files.mkdir(name)
    yield name
    await shared.files.remove(f"/home/user/{name}", recursive=True, user="root")
