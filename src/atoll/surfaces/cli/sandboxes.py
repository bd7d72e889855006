"""`create`, `warm`, `ls`, `ps`, `stat`, `rm` and `doctor`: sandboxes as things that are made, looked at and destroyed.

It knows which facts of a sandbox people ask for. It refuses to know how they are laid out (`render`) and everything
that moves while it is looked at (`streaming`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.contract.errors import AtollError, InvalidRequest, SandboxNotFound
from atoll.contract.model import Limits, ProcessInfo, RuntimeName, SandboxInfo, SystemProcess, Usage
from atoll.contract.network import NetworkPolicy
from atoll.contract.secret import Secret
from atoll.drivers.registry import check_name
from atoll.runtime.engine import open as open_engine
from atoll.surfaces.cli import render, values

if TYPE_CHECKING:
    from atoll.runtime.engine import Engine
    from atoll.runtime.sandbox import Sandbox

SHOWN_ENDED = 10
"""How many commands that have ended `ps` shows to people."""


@dataclass(frozen=True)
class SandboxOptions:
    """A sandbox as it was asked for. What is None is left to the runtime."""

    image: str | None = None
    runtime: str | None = None
    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = None
    open_files: int | None = None
    disk_bytes: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    network: NetworkPolicy | None = None
    secrets: Sequence[values.SecretWord] = ()
    secret_env: Sequence[values.SecretWord] = ()


async def make(engine: Engine, making: SandboxOptions, name: str | None, *, ephemeral: bool) -> Sandbox:
    """Create the sandbox, with progress on standard error while its image is fetched.

    Raises:
        InvalidRequest: a limit is out of its range, there is no such runtime, or a secret is not where it should be.
    """
    with render.Bars() as bars:
        return await engine.create(name, **options(making), ephemeral=ephemeral, progress=bars)


def options(making: SandboxOptions) -> dict[str, Any]:
    """What `Engine.create` and `Engine.pool` are given.

    Raises:
        InvalidRequest: as `make`.
    """
    return {
        "image": making.image,
        "limits": limits_of(making),
        "env": making.env,
        "secrets": {word.name: _secret(word) for word in making.secrets},
        "secret_env": {word.name: values.secret_value(word) for word in making.secret_env},
        "user": making.user or "user",
        "runtime": runtime_name(making.runtime),
        "network": making.network,
    }


async def create(state_dir: Path | None, making: SandboxOptions, name: str | None, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        sandbox = await make(engine, making, name, ephemeral=False)
        if as_json:
            render.emit_json(sandbox.info.model_dump(mode="json"))
        else:
            render.say(sandbox.name)
    return 0


async def warm(state_dir: Path | None, making: SandboxOptions, count: int | None, *, every: bool, as_json: bool) -> int:
    """Keep some ready, or with `every` none of any kind; show what is kept then."""
    async with open_engine(state_dir) as engine:
        if every:
            for warm_pool in await engine.warm_pools():
                await engine.warm(0, image=warm_pool.image, limits=warm_pool.limits, runtime=warm_pool.runtime)
        elif count is not None:
            name = runtime_name(making.runtime)
            await engine.warm(count, image=making.image, limits=limits_of(making), runtime=name)
        warm_pools = await engine.warm_pools()
    if as_json:
        render.emit_json([warm_pool.model_dump(mode="json") for warm_pool in warm_pools])
    elif not warm_pools:
        render.note("no sandboxes wait; `atoll warm --count N` keeps some ready")
    else:
        rows = [
            (
                f"{warm_pool.ready} of {warm_pool.count}",
                warm_pool.runtime,
                _limits_shown(warm_pool.limits),
                warm_pool.image,
            )
            for warm_pool in warm_pools
        ]
        render.table(("READY", "RUNTIME", "LIMITS", "IMAGE"), rows, flex=3)
    return 0


async def ls(state_dir: Path | None, *, quiet: bool, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        infos = await engine.list()
    if as_json:
        render.emit_json([info.model_dump(mode="json") for info in infos])
    elif quiet:
        for info in infos:
            render.say(info.name)
    elif not infos:
        render.note("there are no sandboxes; `atoll create` makes one")
    else:
        rows = [
            (info.name, _state(info), info.runtime, render.ago(info.created_at), _used(info), info.image)
            for info in sorted(infos, key=lambda info: info.created_at)
        ]
        render.table(("NAME", "STATUS", "RUNTIME", "CREATED", "USED", "IMAGE"), rows, flex=5)
    return 0


def _used(info: SandboxInfo) -> str:
    return render.ago(info.last_used_at) if info.last_used_at else "never"


async def ps(state_dir: Path | None, name: str, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        sandbox = await engine.get(name)
        commands = sorted(await sandbox.processes(), key=lambda info: -info.id)
        processes = await sandbox.ps()
    if as_json:
        render.emit_json(
            {
                "commands": [info.model_dump(mode="json") for info in commands],
                "processes": [process.model_dump(mode="json") for process in processes],
            }
        )
        return 0
    if commands:
        render.say("commands, as `atoll logs` numbers them")
        render.table(
            ("ID", "PID", "STATE", "STARTED", "COMMAND"), [_command_row(c) for c in commands], flex=4, indent=2
        )
        render.say("")
    render.say("processes")
    header = ("PID", "PPID", "UID", "S", "MEMORY", "CPU", "COMMAND")
    render.table(header, [_process_row(p) for p in processes], flex=6, indent=2)
    return 0


async def stat(state_dir: Path | None, name: str, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        sandbox = await engine.get(name)
        usage = await sandbox.stat()
        info = sandbox.info
    if as_json:
        limits = info.limits.model_dump(mode="json")
        render.emit_json({"name": name, **usage.model_dump(mode="json"), "limits": limits})
    else:
        render.facts(_usage_facts(info, usage))
    return 0


async def rm(state_dir: Path | None, names: Sequence[str], *, every: bool, force: bool, as_json: bool) -> int:
    """Destroy sandboxes. One that fails does not keep the others; with `force` one that is not there is no failure."""
    removed: list[str] = []
    failures: list[AtollError] = []
    async with open_engine(state_dir) as engine:
        if every:
            names = [info.name for info in await engine.list()]
        for name in dict.fromkeys(names):
            try:
                await engine.destroy(name)
            except SandboxNotFound as error:
                if not force:
                    failures.append(error)
            except AtollError as error:
                failures.append(error)
            else:
                removed.append(name)
                if not as_json:
                    render.say(name)
    if as_json:
        render.emit_json({"removed": removed, "errors": [{**e.to_dict(), "hint": e.hint} for e in failures]})
    else:
        for failure in failures:
            render.failure(failure, as_json=False)
    return 1 if failures else 0


async def doctor(state_dir: Path | None, *, as_json: bool) -> int:
    """Tell what this machine can do and how to mend what it lacks. The status is 1 when no runtime works."""
    async with open_engine(state_dir) as engine:
        found = engine.doctor()
        working = list(engine.drivers())
        where = engine.state_dir
    if as_json:
        findings = [finding.model_dump(mode="json") for finding in found]
        render.emit_json({"runtimes": working, "state_dir": str(where), "findings": findings})
    else:
        render.findings([(finding.ok, finding.topic, finding.detail, finding.fix) for finding in found])
        render.say("")
        if working:
            render.say(f"sandboxes run here with: {', '.join(working)}")
        else:
            render.say("no runtime works here, so no sandbox can be made; the fixes above mend that")
    return 0 if working else 1


def limits_of(making: SandboxOptions) -> Limits:
    from pydantic import ValidationError

    options = {
        "memory_bytes": "--memory",
        "cpus": "--cpus",
        "pids": "--pids",
        "open_files": "--open-files",
        "disk_bytes": "--disk",
    }
    try:
        return Limits(**{name: getattr(making, name) for name in options})
    except ValidationError as error:
        wrong = error.errors()[0]
        option = options[str(wrong["loc"][0])]
        reason = wrong["msg"].replace("Input should be", "it must be")
        raise InvalidRequest(f"{option} is {wrong['input']}, but {reason}") from None


def _secret(word: values.SecretWord) -> Secret:
    return Secret(values.secret_value(word), hosts=word.hosts, header=word.header or "authorization")


def runtime_name(name: str | None) -> RuntimeName | None:
    if name is not None:
        check_name(name)
    return name


def _limits_shown(limits: Limits) -> str:
    shown = [
        limits.memory_bytes and render.human_bytes(limits.memory_bytes),
        limits.cpus and f"{limits.cpus:g} cores",
        limits.pids and f"{limits.pids} processes",
        limits.open_files and f"{limits.open_files} open files",
    ]
    return ", ".join(text for text in shown if text) or "none"


def _state(info: SandboxInfo) -> str:
    return f"{info.status}: {info.reason}" if info.reason else info.status


def _command_row(info: ProcessInfo) -> tuple[str, ...]:
    ended = f"exit {info.exit_code}" + (", children run" if info.live else "")
    state = "running" if info.exit_code is None else ended
    return str(info.id), str(info.pid), state, render.ago(info.started_at), info.command


def _process_row(process: SystemProcess) -> tuple[str, ...]:
    return (
        str(process.pid),
        str(process.ppid),
        str(process.uid),
        process.state,
        render.human_bytes(process.rss_bytes),
        render.human_seconds(process.cpu_s),
        process.command,
    )


def _usage_facts(info: SandboxInfo, usage: Usage) -> list[tuple[str, str]]:
    limits = info.limits
    memory = render.human_bytes(usage.memory_bytes)
    if limits.memory_bytes is not None:
        memory += f" of {render.human_bytes(limits.memory_bytes)}"
    if usage.memory_peak_bytes is not None:
        memory += f", at most {render.human_bytes(usage.memory_peak_bytes)} so far"
    cpu = "?" if usage.cpu_s is None else render.human_seconds(usage.cpu_s)
    if limits.cpus is not None:
        cpu += f", limited to {limits.cpus:g} cores"
    pids = "?" if usage.pids is None else str(usage.pids)
    if limits.pids is not None:
        pids += f" of {limits.pids}"
    disk = f"{render.human_bytes(usage.disk_bytes)} written"
    if limits.disk_bytes is not None:
        disk += f", of {render.human_bytes(limits.disk_bytes)}"
    return [
        ("name", info.name),
        ("status", _state(info)),
        ("image", info.image),
        ("runtime", info.runtime),
        ("created", render.ago(info.created_at)),
        ("used", _used(info)),
        ("memory", memory),
        ("cpu time", cpu),
        ("processes", pids),
        ("disk", disk),
        ("oom kills", "?" if usage.oom_kills is None else str(usage.oom_kills)),
    ]
