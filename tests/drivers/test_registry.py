"""Which drivers there are, which one a sandbox gets, and how a driver of another package is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import atoll
from atoll.contract.driver import Driver
from atoll.drivers import bwrap, oci, registry
from atoll.drivers.machine import Machine

pytestmark = pytest.mark.anyio


def outside(state_dir: Path, machine: Machine) -> Iterator[Driver]:
    """A driver of another package: as bwrap, with another name."""
    for driver in bwrap.drivers(state_dir, machine):
        driver.name = "elsewhere"
        yield driver


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has another package register a driver. Returns what was looked up."""
    looked_up: list[str] = []

    def entry_points(*, group: str) -> list[EntryPoint]:
        looked_up.append(group)
        return [EntryPoint("elsewhere", f"{__name__}:outside", group)]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    return looked_up


@pytest.fixture
def without_oci(monkeypatch: pytest.MonkeyPatch) -> None:
    if "bwrap" not in registry.available(Path("/nowhere")):
        pytest.skip("bwrap cannot be used on this machine")
    monkeypatch.setattr(registry, "_FACTORIES", (bwrap.drivers,))


def test_built_in_drivers_are_listed_fastest_first_and_bwrap_last(tmp_path: Path) -> None:
    names = list(registry.available(tmp_path))
    assert names == [name for name in ("crun", "runc", "runsc", "bwrap") if name in names]


def test_a_driver_of_another_package_comes_last_and_is_looked_for_only_when_needed(
    tmp_path: Path, entry_point: list[str]
) -> None:
    drivers = registry.available(tmp_path)
    assert drivers.get("crun") is None or drivers["crun"].name == "crun"
    assert next(iter(drivers))
    assert entry_point == []
    assert drivers["elsewhere"].name == "elsewhere"
    assert entry_point == ["atoll.drivers"]
    assert list(drivers)[-1] == "elsewhere"
    registry.check_name("elsewhere")


def broken(state_dir: Path, machine: Machine) -> Iterator[Driver]:
    raise OSError("it cannot be used")


@pytest.mark.parametrize("factory", [f"{__name__}:broken", "no_such_module:drivers", f"{__name__}:nothing"])
async def test_a_driver_of_another_package_that_cannot_be_loaded_is_named_by_doctor_and_breaks_nothing(
    factory: str, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_entry_points", lambda: [EntryPoint("elsewhere", factory, registry.GROUP)])
    async with atoll.open(state_dir) as engine:
        assert set(engine.runtimes()) <= set(registry.BUILT_IN)
        [found] = [each for each in engine.doctor() if each.topic == "elsewhere"]
        assert not found.ok
        assert factory.partition(":")[0] in found.detail
        with pytest.raises(atoll.RuntimeUnavailable, match="the runtime elsewhere cannot be used"):
            await engine.create(runtime="elsewhere")


def test_a_package_cannot_replace_a_built_in_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded() -> Callable[..., Any]:
        pytest.fail("it was loaded")

    monkeypatch.setattr(registry, "_entry_points", lambda: [SimpleNamespace(name="crun", load=loaded)])
    assert set(registry.available(tmp_path)) <= set(registry.BUILT_IN)


@pytest.mark.parametrize("name", ["qemu", "../crun", "Crun", ""])
async def test_an_unknown_runtime_is_an_invalid_request_that_lists_the_names(name: str, state_dir: Path) -> None:
    with pytest.raises(atoll.InvalidRequest) as caught:
        registry.check_name(name)
    assert all(each in caught.value.message for each in ("crun", "runc", "runsc", "bwrap"))
    async with atoll.open(state_dir) as engine:
        with pytest.raises(atoll.InvalidRequest):
            await engine.create(runtime=name or "-")


async def test_bwrap_is_not_chosen_without_being_named(state_dir: Path, without_oci: None) -> None:
    async with atoll.open(state_dir) as engine:
        assert next(iter(engine.runtimes())) == "bwrap"
        with pytest.raises(atoll.RuntimeUnavailable, match=r"usable: bwrap.* or request bwrap by name"):
            await engine.create()
        async with await engine.create("named", runtime="bwrap") as sandbox:
            assert sandbox.info.runtime == "bwrap"
            await sandbox.sleep()
            assert (await engine.checkpoint("named")).with_memory is False
            assert len(await engine.checkpoints("named")) == 1
            await engine.gc()
        for checkpoint in await engine.checkpoints():
            await engine.delete_checkpoint(checkpoint.id)


async def test_a_file_cannot_choose_bwrap(state_dir: Path, tmp_path: Path) -> None:
    async with atoll.open(state_dir) as engine:
        if not {"crun", "bwrap"} <= set(engine.runtimes()):
            pytest.skip("crun and bwrap are needed")
        async with await engine.create("there", runtime="bwrap") as sandbox:
            await sandbox.sleep()
            await engine.export("there", tmp_path / "file")
        async with await engine.import_(tmp_path / "file", "back") as back:
            assert back.info.runtime != "bwrap"
        async with await engine.import_(tmp_path / "file", "asked", runtime="bwrap") as asked:
            assert asked.info.runtime == "bwrap"


@pytest.mark.parametrize("limits", [{"memory_bytes": 64 << 20}, {"cpus": 1.0}, {"pids": 64}])
async def test_bwrap_refuses_the_limits_that_it_cannot_enforce(state_dir: Path, limits: dict[str, Any]) -> None:
    async with atoll.open(state_dir) as engine:
        if "bwrap" not in engine.runtimes():
            pytest.skip("bwrap cannot be used on this machine")
        with pytest.raises(atoll.Unenforceable, match="bwrap has no cgroups"):
            await engine.create(runtime="bwrap", limits=atoll.Limits(**limits))
        assert await engine.list() == []


def test_no_two_runtimes_have_one_name() -> None:
    names = [traits.name for traits in oci.RUNTIMES]
    assert len(set(names)) == len(names)
    assert set(registry.BUILT_IN) == {*names, bwrap.NAME}
