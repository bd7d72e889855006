"""The options that describe a sandbox: how they are written, and how the engine is given them.

Owns the resource options (`--image`, `--memory`, `--env`, `--allow`, `--secret` and so on). The signature of
`sandbox_options` declares them for every command; a command class (`command.py`) names those that it takes
(`options.py`). Not here: how a single value is written (`values.py`), what the engine does with the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.grammar import Option
from atoll.surfaces.cli.options import EnvOption

if TYPE_CHECKING:
    from pydantic import ValidationError

    from atoll.contract.model import Limits, RuntimeName
    from atoll.contract.network import NetworkPolicy
    from atoll.contract.secret import Secret
    from atoll.runtime.engine import Engine
    from atoll.runtime.sandbox import Sandbox


class SandboxOptions(NamedTuple):
    """A sandbox as the command line describes it. None: the engine's default."""

    image: str | None = None
    runtime: str | None = None
    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = None
    open_files: int | None = None
    disk_bytes: int | None = None
    env: Mapping[str, str] = MappingProxyType({})
    user: str | None = None
    cwd: str | None = None
    network: NetworkPolicy | None = None
    secrets: Sequence[values.SecretSource] = ()
    secret_env: Sequence[values.SecretSource] = ()

    @property
    def reads_stdin(self) -> bool:
        """Whether the value of a secret is read from standard input."""
        return any(secret.source == "-" for secret in (*self.secrets, *self.secret_env))


def sandbox_options(
    *,
    image: Annotated[
        str | None,
        Option(
            "--image",
            metavar="REF",
            help="The image: host, dir:PATH, tar:PATH, or a reference to a registry such as python:3.12."
            "  [default: $ATOLL_IMAGE, else host]",
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        Option(
            "--runtime",
            metavar="NAME",
            help="The runtime: crun, runc, runsc, or bwrap (only by name)."
            "  [default: $ATOLL_RUNTIME, else the fastest]",
        ),
    ] = None,
    memory: Annotated[
        int | None,
        Option("--memory", "-m", metavar="SIZE", parser=values.size, help="Memory limit: 512m, 1.5g."),
    ] = None,
    cpus: Annotated[float | None, Option("--cpus", metavar="N", help="CPU limit, in cores: 1.5.")] = None,
    pids: Annotated[int | None, Option("--pids", metavar="N", help="Limit on processes and threads.")] = None,
    open_files: Annotated[
        int | None, Option("--open-files", metavar="N", help="Limit on open files per process.")
    ] = None,
    disk: Annotated[
        int | None,
        Option("--disk", metavar="SIZE", parser=values.size, help="Disk quota, for what it writes: 512m, 10g."),
    ] = None,
    env: EnvOption = None,
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
        env=values.environment(env or []),
        user=user,
        cwd=cwd,
        network=network_policy(allow or []),
        secrets=tuple(map(values.secret, secret or [])),
        secret_env=tuple(map(values.secret_variable, secret_env or [])),
    )
    if [each.source for each in (*options.secrets, *options.secret_env)].count("-") > 1:
        raise InvalidRequest("two secrets are read from standard input; only one can be")
    return options


def network_policy(allow: Sequence[str]) -> NetworkPolicy | None:
    """The policy that `--allow` options state. None: there are none, and the engine's default holds.

    Raises:
        InvalidRequest: one is not a rule.
    """
    if not allow:
        return None
    from atoll.contract.network import NetworkPolicy, parse_rule

    for rule in allow:
        parse_rule(rule)
    return NetworkPolicy(allow=allow)


def engine_arguments(options: SandboxOptions) -> dict[str, Any]:
    """The arguments of `Engine.create` and `Engine.pool`.

    Raises:
        InvalidRequest: a limit is out of range, there is no such runtime, or a secret has no value.
    """
    return {
        "image": options.image,
        "limits": limits(options),
        "env": options.env,
        "secrets": {each.name: _secret(each) for each in options.secrets},
        "secret_env": {each.name: values.secret_value(each) for each in options.secret_env},
        "user": options.user,
        "cwd": options.cwd,
        "runtime": runtime_name(options.runtime),
        "network": options.network,
    }


def _secret(source: values.SecretSource) -> Secret:
    from atoll.contract.secret import Secret

    return Secret(values.secret_value(source), hosts=source.hosts, header=source.header or "authorization")


async def create_sandbox(engine: Engine, options: SandboxOptions, name: str | None, *, ephemeral: bool) -> Sandbox:
    """Create the sandbox, and show progress on standard error while its image is pulled.

    Raises:
        InvalidRequest: as `engine_arguments`.
    """
    with render.ProgressBars() as bars:
        return await engine.create(name, **engine_arguments(options), ephemeral=ephemeral, progress=bars)


def limits(options: SandboxOptions) -> Limits:
    """Raises:
    InvalidRequest: a limit is out of range.
    """
    from atoll.contract.model import Limits

    names = {
        "memory_bytes": "--memory",
        "cpus": "--cpus",
        "pids": "--pids",
        "open_files": "--open-files",
        "disk_bytes": "--disk",
    }
    try:
        return Limits(**{name: getattr(options, name) for name in names})
    except ValueError as error:
        wrong = cast("ValidationError", error).errors()[0]
        reason = wrong["msg"].replace("Input should be", "it must be")
        raise InvalidRequest(f"{names[str(wrong['loc'][0])]} is {wrong['input']}, but {reason}") from None


def runtime_name(name: str | None) -> RuntimeName | None:
    """Raises:
    InvalidRequest: there is no runtime of this name.
    """
    from atoll.drivers.registry import check_name

    if name is not None:
        check_name(name)
    return name
