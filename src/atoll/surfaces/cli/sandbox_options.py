"""The options that describe a sandbox: how they are written, and how the engine is given them.

Owns the resource options (`--image`, `--memory`, `--env`, `--allow`, `--secret` and so on). The signature of
`sandbox_options` declares them for every command; a command class (`command.py`) names those that it takes
(`options.py`). Not here: how a single value is written (`values.py`), what the engine does with the values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.grammar import Option
from atoll.surfaces.cli.options import EnvFileOption, EnvOption, LabelOption

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

    from atoll.contract.model import Limits, Mount, RuntimeName
    from atoll.contract.network import NetworkPolicy
    from atoll.contract.secret import Secret
    from atoll.runtime.interface import Engine
    from atoll.runtime.sandbox import Sandbox

_LIMIT_OPTIONS = {
    "memory_bytes": "--memory",
    "cpus": "--cpus",
    "pids": "--pids",
    "open_files": "--open-files",
    "disk_bytes": "--disk",
}
_MAX_MEGABYTES = 65536
"""A size up to this, without a unit, was probably meant in megabytes."""


class SandboxOptions(NamedTuple):
    """A sandbox as the command line describes it. None: the engine's default."""

    image: str | None = None
    runtime: str | None = None
    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = None
    open_files: int | None = None
    disk_bytes: int | None = None
    mounts: Sequence[Mount] = ()
    env: Mapping[str, str] = MappingProxyType({})
    user: str | None = None
    cwd: str | None = None
    network: NetworkPolicy | None = None
    secrets: Sequence[values.SecretSource] = ()
    secret_env: Sequence[values.SecretSource] = ()
    labels: Mapping[str, str] = MappingProxyType({})
    ttl_s: float | None = None
    on_expiry: str | None = None
    ttl_renewed_by_use: bool = False
    pause_after_s: float | None = None
    sudo: bool = False
    from_checkpoint: str | None = None

    @property
    def reads_stdin(self) -> bool:
        """Whether the value of a secret is read from standard input."""
        return any(secret.source == "-" for secret in (*self.secrets, *self.secret_env))


def sandbox_options(  # noqa: PLR0913 - one for each option
    *,
    image: Annotated[
        str | None,
        Option(
            "--image",
            metavar="REF",
            help="The image: host, dir:PATH, tar:PATH, template:NAME, or a reference to a registry such as python:3.12."
            "  [default: $ATOLL_IMAGE, else host]",
            completes="image",
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        Option(
            "--runtime",
            metavar="NAME",
            help="The runtime: crun, runc, runsc, or bwrap (only by name)."
            "  [default: $ATOLL_RUNTIME, else the fastest]",
            completes="runtime",
        ),
    ] = None,
    memory: Annotated[
        int | None,
        Option(
            "--memory",
            "-m",
            metavar="SIZE",
            parser=values.size,
            help="Memory limit: 512m, 1.5g.  [default: 2g where it can be enforced]",
        ),
    ] = None,
    cpus: Annotated[
        float | None, Option("--cpus", metavar="N", help="CPU limit, in cores: 1.5.  [default: no limit]")
    ] = None,
    pids: Annotated[
        int | None,
        Option(
            "--pids",
            metavar="N",
            help="Limit on processes and threads.  [default: 1024 where it can be enforced]",
        ),
    ] = None,
    open_files: Annotated[
        int | None,
        Option("--open-files", metavar="N", help="Limit on open files per process.  [default: this machine's]"),
    ] = None,
    disk: Annotated[
        int | None,
        Option(
            "--disk",
            metavar="SIZE",
            parser=values.size,
            help="Disk quota, for what it writes: 512m, 10g.  [default: no limit]",
        ),
    ] = None,
    mount: Annotated[
        list[str] | None,
        Option(
            "--mount",
            metavar="SRC:DST[:ro|:rw]",
            help="Mount a directory of this machine, read-only unless :rw follows, or volume:NAME:DST, which can be "
            "written unless :ro follows. Repeatable.  [default: nothing of this machine]",
        ),
    ] = None,
    env: EnvOption = None,
    env_file: EnvFileOption = None,
    allow: Annotated[
        list[str] | None,
        Option(
            "--allow",
            metavar="RULE",
            help="Allow egress to example.com, *.example.com:443, 10.0.0.0/8:5432 or registries. Repeatable."
            "  [default: no egress]",
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        Option(
            "--secret",
            metavar="NAME[=FROM]@HOST",
            help="A secret that stays outside the sandbox and is injected into requests to these hosts only: "
            "NAME=FROM@HOST,HOST:HEADER. FROM is an environment variable of ours, file:PATH, or - for standard input. "
            "Repeatable.  [default: FROM is NAME, HEADER is authorization]",
        ),
    ] = None,
    secret_env: Annotated[
        list[str] | None,
        Option(
            "--secret-env",
            metavar="NAME[=FROM]",
            help="An environment variable that is never shown outside the sandbox; FROM as for --secret. Repeatable.",
        ),
    ] = None,
    user: Annotated[
        str | None,
        Option("--user", "-u", metavar="USER", help="The user inside.  [default: the image's, else user]"),
    ] = None,
    cwd: Annotated[
        str | None,
        Option(
            "--cwd",
            "-w",
            metavar="DIR",
            help="Where commands start; it is made if it is missing.  [default: the image's, else the user's home]",
        ),
    ] = None,
    label: LabelOption = None,
    ttl: Annotated[
        float | None,
        Option(
            "--ttl",
            metavar="TIME",
            parser=values.duration,
            help="Destroy the sandbox after this time, in use or not: 30m, 8h, 7d.  [default: never]",
        ),
    ] = None,
    on_expiry: Annotated[
        str | None,
        Option(
            "--on-expiry",
            metavar="ACTION",
            help="What happens when --ttl is over: destroy, or sleep or pause until it is used again."
            "  [default: destroy]",
        ),
    ] = None,
    ttl_renewed_by_use: Annotated[
        bool | None, Option("--ttl-renewed-by-use", help="Each use begins --ttl anew: it is over when nothing uses it.")
    ] = None,
    pause_after: Annotated[
        float | None,
        Option(
            "--pause-after",
            metavar="TIME",
            parser=values.duration,
            help="Pause it when it is unused for this time: 30s, 5m. Using it resumes it.  [default: never]",
        ),
    ] = None,
    sudo: Annotated[
        bool | None,
        Option("--sudo", help="Let the user inside become root with sudo, without a password.  [default: no]"),
    ] = None,
    from_checkpoint: Annotated[
        str | None,
        Option(
            "--from",
            metavar="CHECKPOINT",
            help="Begin as this checkpoint of any sandbox, with its image and runtime: its id, or its label.",
        ),
    ] = None,
) -> SandboxOptions:
    """Declare the resource options, and build one object from their values.

    Raises:
        InvalidRequest: an option has a wrong value, or two secrets are read from standard input.
    """
    options = SandboxOptions(
        image=image,
        runtime=runtime,
        memory_bytes=memory,
        cpus=cpus,
        pids=pids,
        open_files=open_files,
        disk_bytes=disk,
        mounts=tuple(map(values.mount, mount or [])),
        env=values.environment(env or [], env_file or []),
        user=user,
        cwd=cwd,
        network=network_policy(allow or []),
        secrets=tuple(map(values.secret, secret or [])),
        secret_env=tuple(map(values.secret_variable, secret_env or [])),
        labels=values.labels(label or []),
        ttl_s=ttl,
        on_expiry=on_expiry,
        ttl_renewed_by_use=bool(ttl_renewed_by_use),
        pause_after_s=pause_after,
        sudo=bool(sudo),
        from_checkpoint=from_checkpoint,
    )
    if [each.source for each in (*options.secrets, *options.secret_env)].count("-") > 1:
        raise InvalidRequest("two secrets are read from standard input; only one can be")
    return options


def _warn_of_unreachable_hosts(options: SandboxOptions) -> None:
    """Say which secrets can never be sent: no rule allows their hosts. A range of addresses and a preset may."""
    rules = options.network.rules if options.network is not None else ()
    if any(rule.name is None for rule in rules):
        return
    for secret in options.secrets:
        for host in secret.hosts:
            name = host.lower().removeprefix("http://")
            if not any(rule.covers_name(name) for rule in rules):
                render.note(
                    f"warning: --secret {secret.name} is for {name}, which no --allow rule allows: add --allow {name}"
                )


def network_policy(allow: Sequence[str]) -> NetworkPolicy | None:
    """The policy that `--allow` options state. None: there are none, and the engine's default holds.

    Raises:
        InvalidRequest: one is not a rule.
    """
    if not allow:
        return None
    import difflib

    from atoll.contract.network import REGISTRIES, NetworkPolicy, parse_rule

    for rule in allow:
        parse_rule(rule)
        if rule != REGISTRIES and difflib.get_close_matches(rule, [REGISTRIES], cutoff=0.75):
            render.note(f"warning: the rule {rule} is for a host of that name; package indexes are {REGISTRIES}")
    return NetworkPolicy(allow=allow)


def starting_in_mount(options: SandboxOptions) -> SandboxOptions:
    """The options for a model that works in sandboxes: without a `cwd` it starts in the first directory of this machine
    that it may write to, if one is mounted."""
    writable = [each.target for each in options.mounts if each.volume is None and not each.is_read_only]
    return options._replace(cwd=writable[0]) if writable and options.cwd is None else options


def engine_arguments(options: SandboxOptions) -> dict[str, Any]:
    """The arguments of `Engine.create` and `Engine.pool`.

    Raises:
        InvalidRequest: a limit is out of range, there is no such runtime, or a secret has no value.
    """
    arguments = {
        "image": options.image,
        "limits": limits(options),
        "env": options.env,
        "secrets": {each.name: _secret(each) for each in options.secrets},
        "secret_env": {each.name: values.secret_value(each) for each in options.secret_env},
        "user": options.user,
        "cwd": options.cwd,
        "runtime": runtime_name(options.runtime),
        "network": options.network,
        "labels": options.labels,
        "ttl_s": options.ttl_s,
        "on_expiry": options.on_expiry or "destroy",
        "ttl_renewed_by_use": options.ttl_renewed_by_use,
        "pause_after_s": options.pause_after_s,
        "sudo": options.sudo,
        "mounts": options.mounts,
    }
    _warn_of_unreachable_hosts(options)
    return arguments


def _secret(source: values.SecretSource) -> Secret:
    from atoll.contract.secret import Secret

    return Secret(values.secret_value(source), hosts=source.hosts, header=source.header or "authorization")


async def create_sandbox(engine: Engine, options: SandboxOptions, name: str | None, *, ephemeral: bool) -> Sandbox:
    """Create the sandbox, and show progress on standard error while its image is pulled.

    Raises:
        InvalidRequest: as `engine_arguments`.
    """
    with render.ProgressBars() as bars:
        return await engine.create(
            name,
            **engine_arguments(options),
            ephemeral=ephemeral,
            from_checkpoint=options.from_checkpoint,
            progress=bars,
        )


def limits(options: SandboxOptions) -> Limits:
    """Raises:
    InvalidRequest: a limit is out of range.
    """
    from atoll.contract.model import Limits

    try:
        chosen = Limits.model_validate({name: getattr(options, name) for name in _LIMIT_OPTIONS})
    except ValueError as error:
        raise _out_of_range(cast("ValidationError", error).errors()[0]) from None
    _warn_of_limits_beyond_the_machine(chosen)
    return chosen


def _out_of_range(wrong: ErrorDetails) -> InvalidRequest:
    """Which limit is wrong, and what is allowed, in the words of the command line."""
    field, value, bounds = str(wrong["loc"][0]), wrong["input"], wrong.get("ctx", {})
    show = _exact_size if field.endswith("_bytes") else "{:,g}".format
    allowed = [f"at {what} {show(bounds[key])}" for key, what in (("ge", "least"), ("le", "most")) if key in bounds]
    reason = f"it must be {allowed[0]}" if allowed else wrong["msg"]
    megabytes = field.endswith("_bytes") and isinstance(value, int) and value <= _MAX_MEGABYTES
    meant = f"; did you mean {value}m?" if megabytes else ""
    return InvalidRequest(f"{_LIMIT_OPTIONS[field]} is {show(value)}; {reason}{meant}")


def _exact_size(amount: int) -> str:
    return render.human_bytes(amount).replace(".0 ", " ").replace(" B", " bytes")


def _warn_of_limits_beyond_the_machine(limits: Limits) -> None:
    memory, cores = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), os.cpu_count() or 1
    if limits.memory_bytes is not None and limits.memory_bytes > memory:
        asked, has = _exact_size(limits.memory_bytes), _exact_size(memory)
        render.note(f"warning: --memory is {asked}, and this machine has {has}: its own memory is the limit")
    if limits.cpus is not None and limits.cpus > cores:
        render.note(f"warning: --cpus is {limits.cpus:g}, and this machine has {cores} cores: they are the limit")


def runtime_name(name: str | None) -> RuntimeName | None:
    """Raises:
    InvalidRequest: there is no runtime of this name.
    """
    from atoll.drivers.registry import check_name

    if name is not None:
        check_name(name)
    return name
