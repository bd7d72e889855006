"""The drivers that this machine can use. The only place that lists them.

A driver of another package registers itself in the entry-point group `atoll.drivers`. The entry point has the runtime's
name and refers to a callable `(state_dir: Path, machine: Machine) -> Iterable[Driver]`, which returns no driver where
the machine lacks something. Such a driver is used like a built-in one, after those, and by name. Entry points are
looked up only when drivers are listed or a name is none of ours. A driver that cannot be loaded is not available, and
`atoll doctor` says why.

Not here: what a driver does (`oci.py`, `bwrap.py`), which one a sandbox gets (`runtime/engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.contract.driver import Diagnostic, Driver
from atoll.contract.errors import InvalidRequest
from atoll.contract.model import RuntimeName
from atoll.drivers import bwrap, oci
from atoll.drivers.machine import Machine, read_machine

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "atoll.drivers"
DriverFactory = Callable[[Path, Machine], Iterable[Driver]]

_PACKAGES: Mapping[RuntimeName, str] = {
    **{traits.name: traits.package for traits in oci.RUNTIMES},
    bwrap.NAME: bwrap.PACKAGE,
}
"""The built-in runtimes, and the Debian packages that install them."""
BUILT_IN: tuple[RuntimeName, ...] = tuple(_PACKAGES)
_FACTORIES: tuple[DriverFactory, ...] = (oci.drivers, bwrap.drivers)


def available(state_dir: Path, machine: Machine | None = None) -> Mapping[RuntimeName, Driver]:
    """The drivers whose runtimes are installed and usable here, fastest first, then those used by name only.

    Outside drivers are loaded when the mapping is iterated beyond the built-in ones, or when one is looked up.
    """
    return _Available(state_dir, machine or read_machine())


class _Available(Mapping[RuntimeName, Driver]):
    def __init__(self, state_dir: Path, machine: Machine) -> None:
        self._state_dir = state_dir
        self._machine = machine
        self._built_in = {driver.name: driver for factory in _FACTORIES for driver in factory(state_dir, machine)}

    @cached_property
    def _outside(self) -> dict[RuntimeName, Driver]:
        drivers: dict[RuntimeName, Driver] = {}
        self.failures: list[Diagnostic] = []
        for entry in (entry for entry in _entry_points() if entry.name not in BUILT_IN):
            try:
                factory: DriverFactory = entry.load()
                found = {driver.name: driver for driver in factory(self._state_dir, self._machine)}
            except Exception as error:  # noqa: BLE001 - another package's code: it must not break what does not need it
                self.failures.append(_cannot_load(entry, error))
            else:
                drivers |= {name: driver for name, driver in found.items() if name not in BUILT_IN}
        return drivers

    def __getitem__(self, name: RuntimeName) -> Driver:
        return (self._built_in if name in BUILT_IN else self._outside)[name]

    def __iter__(self) -> Iterator[RuntimeName]:
        yield from self._built_in
        yield from self._outside

    def __len__(self) -> int:
        return len(self._built_in) + len(self._outside)


def doctor(state_dir: Path, machine: Machine | None = None) -> list[Diagnostic]:
    """What this machine supports and, for everything that is missing, the command that fixes it."""
    from atoll.drivers.doctor import examine

    machine = machine or read_machine()
    drivers = _Available(state_dir, machine)
    len(drivers)  # loads the outside drivers
    found = examine(state_dir, machine, _PACKAGES, by_name=(bwrap.NAME,), older=oci.find_older())
    return [*found, *drivers.failures]


def _cannot_load(entry: EntryPoint, error: Exception) -> Diagnostic:
    package = entry.dist.name if entry.dist else entry.module
    return Diagnostic(
        topic=entry.name,
        ok=False,
        detail=f"the driver of the package {package} cannot be loaded: {type(error).__name__}: {error}",
        fix=f"pip uninstall {package}, or install a version of it that fits this Atoll",
    )


def check_name(name: RuntimeName, *, setting: str | None = None) -> None:
    """Check that a runtime of this name exists, be it installed or not. `setting` is where the name came from.

    Raises:
        InvalidRequest: there is none; the message lists the names.
    """
    if name in BUILT_IN:
        return
    known = [*BUILT_IN, *(entry.name for entry in _entry_points())]
    if name not in known:
        where = f"{setting}: " if setting else ""
        raise InvalidRequest(f"{where}{name!r} is not a runtime; available names: {', '.join(known)}", runtime=name)


def package(name: RuntimeName | None) -> str:
    """The Debian package that installs a runtime; None: the fastest."""
    return _PACKAGES.get(name or BUILT_IN[0], str(name))


def _entry_points() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # takes 15 ms or more: not for a command with a built-in runtime

    return entry_points(group=GROUP)
