"""The grammar of the command line: names, arguments, options and help texts.

It refuses to know what a command does: each one hands a request to `streaming`, `sandboxes` or `images`, which
are imported in its body, because `--help` must not wait for pydantic, asyncio and the runtime. The package
itself says what becomes of errors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import OWN_FAILURE, finish, render, values
from atoll.surfaces.cli.options import (
    Allow,
    Command,
    CommandLast,
    Cpus,
    Cwd,
    Disk,
    Env,
    Image,
    Json,
    MayHaveAddress,
    Memory,
    Name,
    NameThenCommand,
    OpenFiles,
    Pids,
    Reference,
    RuntimeOption,
    SecretEnv,
    Secrets,
    ShellLine,
    StateDir,
    Stdin,
    Timeout,
    Tty,
    User,
)
from atoll.tools.vocabularies import summary

app = typer.Typer(
    name="atoll",
    help="Give every AI agent its own Linux machine, on your own hardware.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
images_app = typer.Typer(help="Fetch, list and remove what sandboxes are made from.")
app.add_typer(images_app, name="images")
storage_app = typer.Typer(help="Show what sandboxes write to, or give them a file system of their own.")
app.add_typer(storage_app, name="storage")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        render.say(f"atoll {_version()}")
        raise typer.Exit
    _help_without_command(context)


@images_app.callback(invoke_without_command=True)
def images_root(context: typer.Context) -> None:
    _help_without_command(context)


def _hidden(
    secrets: list[str], secret_env: list[str]
) -> tuple[tuple[values.SecretWord, ...], tuple[values.SecretWord, ...]]:
    words = tuple(map(values.secret, secrets)), tuple(map(values.secret_variable, secret_env))
    if [word.source for each in words for word in each].count("-") > 1:
        raise InvalidRequest("standard input can be the source of one secret alone")
    return words


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        render.say(context.get_help())
        raise typer.Exit


@app.command(cls=CommandLast)
def run(  # noqa: PLR0913, PLR0917 - options are parameters to typer; they become two requests at once
    command: Command = None,
    line: ShellLine = None,
    image: Image = None,
    runtime: RuntimeOption = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    open_files: OpenFiles = None,
    disk: Disk = None,
    env: Env = None,
    allow: Allow = None,
    secret: Secrets = None,
    secret_env: SecretEnv = None,
    user: User = None,
    cwd: Cwd = None,
    timeout: Timeout = None,
    tty: Tty = False,
    stdin: Stdin = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the sandbox afterwards.")] = False,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="The sandbox's name.")] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Run a command in a new sandbox that ends with it.

    Input, output and exit status are the command's own. Ctrl-C and SIGTERM kill all that it started.

    \b
    atoll run -- python3 -c 'print(1)'
    atoll run -c 'echo $HOME | tr a-z A-Z'
    """
    wanted = _command(command, line)
    variables = values.environment(env or [])
    hidden = _hidden(secret or [], secret_env or [])
    from atoll.surfaces.cli import network, sandboxes, streaming

    policy = network.policy(allow or [])
    making = sandboxes.SandboxOptions(
        image, runtime, memory, cpus, pids, open_files, disk, variables, user, policy, *hidden
    )
    call = streaming.Call(wanted, {}, None, cwd, timeout, tty, stdin, as_json)
    return finish(
        lambda: streaming.run(state_dir, making, call, name=name, keep=keep), as_json=as_json, failed=OWN_FAILURE
    )


@app.command()
def create(  # noqa: PLR0913, PLR0917 - options are parameters to typer
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Its name.  [default: one is made up]", show_default=False)
    ] = None,
    image: Image = None,
    runtime: RuntimeOption = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    open_files: OpenFiles = None,
    disk: Disk = None,
    env: Env = None,
    allow: Allow = None,
    secret: Secrets = None,
    secret_env: SecretEnv = None,
    user: User = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Create a sandbox and print its name."""
    variables = values.environment(env or [])
    hidden = _hidden(secret or [], secret_env or [])
    from atoll.surfaces.cli import network, sandboxes

    policy = network.policy(allow or [])
    making = sandboxes.SandboxOptions(
        image, runtime, memory, cpus, pids, open_files, disk, variables, user, policy, *hidden
    )
    return finish(lambda: sandboxes.create(state_dir, making, name, as_json=as_json), as_json=as_json)


@app.command(cls=NameThenCommand)
def exec(
    name: Name,
    command: Command = None,
    line: ShellLine = None,
    env: Env = None,
    user: User = None,
    cwd: Cwd = None,
    timeout: Timeout = None,
    tty: Tty = False,
    stdin: Stdin = True,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running and print its number.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Run a command in a sandbox.

    Input, output and exit status are the command's own. Ctrl-C and SIGTERM kill all that it started.

    \b
    atoll exec box -- make -j4
    atoll exec box --user root -c 'apt-get update && apt-get install -y jq'
    atoll exec box --detach -- python3 -m http.server
    """
    wanted = _command(command, line)
    variables = values.environment(env or [])
    if detach and timeout is not None:
        raise InvalidRequest("--timeout needs someone who waits: it cannot be given with --detach")
    from atoll.surfaces.cli import streaming

    call = streaming.Call(wanted, variables, user, cwd, timeout, tty, stdin, as_json)
    does = streaming.detach if detach else streaming.exec
    return finish(lambda: does(state_dir, name, call), as_json=as_json, failed=OWN_FAILURE)


@app.command(cls=NameThenCommand)
def shell(
    name: Name,
    command: Command = None,
    env: Env = None,
    user: User = None,
    cwd: Cwd = None,
    state_dir: StateDir = None,
) -> int:
    """Open a shell in a sandbox, or COMMAND, on this terminal."""
    variables = values.environment(env or [])
    from atoll.surfaces.cli import streaming

    call = streaming.Call(command or "", variables, user, cwd, tty=True)
    return finish(lambda: streaming.shell(state_dir, name, call), failed=OWN_FAILURE)


@app.command()
def ls(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print names only.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """List the sandboxes."""
    from atoll.surfaces.cli import sandboxes

    return finish(lambda: sandboxes.ls(state_dir, quiet=quiet, as_json=as_json), as_json=as_json)


@app.command()
def ps(name: Name, state_dir: StateDir = None, as_json: Json = False) -> int:
    """List a sandbox's commands and processes."""
    from atoll.surfaces.cli import sandboxes

    return finish(lambda: sandboxes.ps(state_dir, name, as_json=as_json), as_json=as_json)


@app.command()
def stat(name: Name, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Show what a sandbox uses, and its limits."""
    from atoll.surfaces.cli import sandboxes

    return finish(lambda: sandboxes.stat(state_dir, name, as_json=as_json), as_json=as_json)


@app.command()
def rm(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="The sandboxes.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Destroy all sandboxes.")] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Do not ask, and pass over those that are not there.")
    ] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Destroy sandboxes with all that runs and lies in them."""
    if bool(names) == every:
        raise InvalidRequest("name the sandboxes to destroy, or give --all")

    if every and not force and sys.stdin.isatty():
        typer.confirm("Destroy all sandboxes?", abort=True, err=True)
    from atoll.surfaces.cli import sandboxes

    return finish(
        lambda: sandboxes.rm(state_dir, names or [], every=every, force=force, as_json=as_json), as_json=as_json
    )


@app.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="What to copy.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where to.", show_default=False)],
    user: Annotated[
        str | None,
        typer.Option("--user", "-u", metavar="USER", help="As whom, inside.  [default: the sandbox's user]"),
    ] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Copy files and directories between this machine and a sandbox.

    NAME:PATH is a path in a sandbox (a relative one from the user's home), all else is a path here, and - is standard
    input or output. Directories are copied with all that is in them; into a DST that is a directory, SRC comes under
    its own name.

    \b
    atoll cp report.csv box:data/
    atoll cp box:/var/log ./logs
    """
    journey = values.journey(source, target)
    if as_json and journey.is_stream and not journey.inward:
        raise InvalidRequest("--json and - both want standard output; leave one of them out")
    from atoll.surfaces.cli import streaming

    return finish(lambda: streaming.cp(state_dir, journey, user=user, as_json=as_json), as_json=as_json)


@app.command()
def logs(
    name: Name,
    number: Annotated[
        int | None,
        typer.Argument(metavar="ID", help="The command, as ps shows it.  [default: the latest]", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the command ends.")] = False,
    since: Annotated[
        str | None, typer.Option("--since-offset", metavar="BYTES", help="Begin here: one number, or OUT,ERR.")
    ] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Print the output that is kept of a command."""
    begin = None if since is None else values.offsets(since)
    from atoll.surfaces.cli import streaming

    return finish(
        lambda: streaming.logs(state_dir, name, number, begin, follow=follow, as_json=as_json), as_json=as_json
    )


@app.command()
def network(
    name: Name,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", metavar="RULE", help="Add this rule. Repeatable.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="RULE", help="Take this rule away. Repeatable.")
    ] = None,
    nothing: Annotated[bool, typer.Option("--none", help="Let nothing leave it.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Show what may leave a sandbox, or change it, whatever runs in it.

    A rule is a name (example.com), all names below one (*.example.com), any host (*), an address or a range, each with
    :PORT or :LOW-HIGH if it is for some ports alone; or registries, the package indexes that this machine is
    configured for.

    \b
    atoll network box --allow registries --allow '*.example.com:443'
    """
    if nothing and (allow or remove):
        raise InvalidRequest("--none goes alone: it takes all rules away")
    from atoll.surfaces.cli import network as does

    does.policy([*(allow or []), *(remove or [])])
    return finish(
        lambda: does.network(state_dir, name, allow or [], remove or [], nothing=nothing, as_json=as_json),
        as_json=as_json,
    )


@app.command()
def audit(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, a line each.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Show what left a sandbox, and what tried to and was denied."""
    from atoll.surfaces.cli import network as does

    return finish(lambda: does.audit(state_dir, name, follow=follow, as_json=as_json), as_json=as_json)


@app.command()
def expose(
    name: Name,
    port: Annotated[int, typer.Argument(metavar="PORT", help="The port inside.", show_default=False)],
    wait: Annotated[
        float | None,
        typer.Option("--wait", metavar="TIME", parser=values.duration, help="Wait until something listens: 30s, 5m."),
    ] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Serve a port of a sandbox to browsers and other clients, until interrupted.

    Prints its address, which holds a token that lets whoever has it in, and the same for clients that do not resolve
    names below .localhost. Each request is noted on standard error. $ATOLL_PREVIEW_LISTEN says where it is served:
    localhost:0, which is any free port, unless set.
    """
    from atoll.surfaces.cli import previews

    return finish(lambda: previews.expose(state_dir, name, port, wait_s=wait or 0, as_json=as_json), as_json=as_json)


@app.command()
def sleep(
    name: Name,
    warm: Annotated[bool, typer.Option("--warm", help="Keep its processes, standing still in memory.")] = False,
    shutdown: Annotated[
        bool, typer.Option("--shutdown", help="Until it is told to wake, not until it is used.")
    ] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Put a sandbox to sleep until it is next used.

    Its files stay. Its processes end, unless it is to be warm or runs with runsc, where they go on when it wakes.
    """
    if warm and shutdown:
        raise InvalidRequest("--warm and --shutdown cannot both be: what was shut down has no processes")
    from atoll.surfaces.cli import checkpoints as does

    return finish(
        lambda: does.sleep(state_dir, name, warm=warm, until_woken=shutdown, as_json=as_json), as_json=as_json
    )


@app.command()
def wake(name: Name, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Have a sandbox run that sleeps, was shut down, or has ended."""
    from atoll.surfaces.cli import checkpoints as does

    return finish(lambda: does.wake(state_dir, name, as_json=as_json), as_json=as_json)


@app.command()
def checkpoint(
    name: Name,
    label: Annotated[
        str | None, typer.Argument(metavar="LABEL", help="What to call it.  [default: nothing]", show_default=False)
    ] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Remember a sandbox as it is now, and print the checkpoint's id."""
    from atoll.surfaces.cli import checkpoints as does

    return finish(lambda: does.checkpoint(state_dir, name, label, as_json=as_json), as_json=as_json)


@app.command()
def checkpoints(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The sandbox.  [default: all]", show_default=False)
    ] = None,
    delete: Annotated[
        list[str] | None, typer.Option("--delete", metavar="CHECKPOINT", help="Delete this one. Repeatable.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Show the tree of checkpoints."""
    from atoll.surfaces.cli import checkpoints as does

    return finish(
        lambda: does.checkpoints(state_dir, name, delete=delete or [], quiet=quiet, as_json=as_json), as_json=as_json
    )


CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Its id, or its label.", show_default=False)
]


@app.command()
def restore(name: Name, checkpoint: CheckpointArgument, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Have a sandbox be again what it was at a checkpoint. What was written since is lost."""
    from atoll.surfaces.cli import checkpoints as does

    return finish(lambda: does.restore(state_dir, name, checkpoint, as_json=as_json), as_json=as_json)


@app.command()
def fork(
    name: Name,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NEW", help="What to call them.  [default: made up]", show_default=False),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", help="How many, when they are not named.")] = 1,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="CHECKPOINT", help="As it was then.  [default: as it is now]")
    ] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Make sandboxes that begin as another one is, and print their names."""
    from atoll.surfaces.cli import checkpoints as does

    return finish(
        lambda: does.fork(state_dir, name, names or [], count=count, checkpoint=checkpoint, as_json=as_json),
        as_json=as_json,
    )


@app.command()
def warm(
    count: Annotated[
        int | None, typer.Option("--count", "-n", metavar="N", help="How many; 0 ends them.  [default: show them]")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="With --count 0: of every kind.")] = False,
    image: Image = None,
    runtime: RuntimeOption = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    open_files: OpenFiles = None,
    disk: Disk = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Keep sandboxes of one kind ready, so that creating one takes no time, or show those that are.

    Whoever creates or runs one with this image, this runtime and these limits takes one that waits, and puts up another
    before it ends.

    \b
    atoll warm --image python:3.12 --count 4
    """
    if every and count != 0:
        raise InvalidRequest("--all goes with --count 0, which ends the sandboxes of every kind that wait")
    from atoll.surfaces.cli import sandboxes

    making = sandboxes.SandboxOptions(image, runtime, memory, cpus, pids, open_files, disk)
    return finish(lambda: sandboxes.warm(state_dir, making, count, every=every, as_json=as_json), as_json=as_json)


@app.command()
def export(
    name: Name,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Where to, - being standard output.  [default: NAME.tar.zst]", show_default=False
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="CHECKPOINT", help="As it was then.  [default: as it is now]")
    ] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Write a sandbox to one file, for another machine or for later.

    The file holds what was written on top of the image, and the environment. The image is not in it, and processes
    are not.

    \b
    atoll export box box.tar.zst
    atoll export box - | ssh other atoll import -
    """
    target = file or Path(f"{name}.tar.zst")
    if str(target) == "-":
        if as_json:
            raise InvalidRequest("--json and - both want standard output; leave one of them out")
        if sys.stdout.isatty():
            raise InvalidRequest("standard output is a terminal; name a file, or pipe it into something")
    from atoll.surfaces.cli import checkpoints as does

    return finish(lambda: does.export(state_dir, name, target, checkpoint=checkpoint, as_json=as_json), as_json=as_json)


@app.command("import")
def import_(  # noqa: PLR0913, PLR0917 - options are parameters to typer
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `export` wrote, - being standard input.", show_default=False)
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Its name.  [default: as it was called]", show_default=False)
    ] = None,
    image: Annotated[
        str | None,
        typer.Option("--image", metavar="REF", help="What it is to stand on.  [default: the same as before]"),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            "--runtime",
            metavar="NAME",
            help="crun, runc or runsc.  [default: $ATOLL_RUNTIME, else the file's, else the fastest]",
        ),
    ] = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    open_files: OpenFiles = None,
    disk: Disk = None,
    default_limits: Annotated[
        bool, typer.Option("--default-limits", help="Limits as of a new sandbox, whatever the file says.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="SIZE",
            parser=values.size,
            help="What it may take up unpacked.  [default: three quarters of the free disk]",
        ),
    ] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Make a sandbox from a file that `export` wrote, and print its name.

    Nothing in the file is trusted, and a damaged one leaves nothing. The image that it stands on has to be here
    already; one on `host` stands on this machine's own. A limit given here replaces all of the file's.
    """
    if str(file) == "-" and sys.stdin.isatty():
        raise InvalidRequest("standard input is a terminal; name a file, or pipe one into this")
    from atoll.surfaces.cli import checkpoints as does, sandboxes

    making = sandboxes.SandboxOptions(image, runtime, memory, cpus, pids, open_files, disk)
    return finish(
        lambda: does.import_(
            state_dir, file, name, making, default_limits=default_limits, limit_bytes=limit, as_json=as_json
        ),
        as_json=as_json,
    )


@app.command()
def gc(state_dir: StateDir = None, as_json: Json = False) -> int:
    """Free what nobody needs any more, and put in order what was left half done."""
    from atoll.surfaces.cli import checkpoints as does

    return finish(lambda: does.gc(state_dir, as_json=as_json), as_json=as_json)


@images_app.command("ls")
def images_ls(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print references only.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """List the images that are here."""
    from atoll.surfaces.cli import images

    return finish(lambda: images.ls(state_dir, quiet=quiet, as_json=as_json), as_json=as_json)


@images_app.command("pull")
def images_pull(reference: Reference, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Fetch an image before a sandbox needs it."""
    from atoll.surfaces.cli import images

    return finish(lambda: images.pull(state_dir, reference, as_json=as_json), as_json=as_json)


@images_app.command("rm")
def images_rm(
    references: Annotated[list[str], typer.Argument(metavar="REF", help="The images.", show_default=False)],
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Remove images that no sandbox stands on."""
    from atoll.surfaces.cli import images

    return finish(lambda: images.rm(state_dir, references, as_json=as_json), as_json=as_json)


@images_app.command("import")
def images_import(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="A tar of a root file system, or a saved image.", show_default=False)
    ],
    reference: Reference,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Make an image from a file."""
    from atoll.surfaces.cli import images

    return finish(lambda: images.import_(state_dir, source, reference, as_json=as_json), as_json=as_json)


@storage_app.callback(invoke_without_command=True)
def storage(context: typer.Context, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Show what sandboxes write to, or give them a file system of their own."""
    if context.invoked_subcommand is not None:
        return 0
    from atoll.surfaces.cli import storage as does

    return finish(lambda: does.show(state_dir, as_json=as_json), as_json=as_json)


@storage_app.command("init")
def storage_init(
    size: Annotated[int, typer.Option("--size", metavar="SIZE", parser=values.size, help="Of the file system: 50g.")],
    filesystem: Annotated[str, typer.Option("--fs", metavar="KIND", help="btrfs or xfs.")] = "btrfs",
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Give what sandboxes write a file system of its own, in a file in the state directory.

    With btrfs, a running sandbox is checkpointed and forked at once, whatever it has written, and --disk is enforced.
    The file grows as it is written to, and shrinks again. It is mounted whenever the state directory is used.
    """
    from atoll.surfaces.cli import storage as does

    return finish(lambda: does.init(state_dir, size, filesystem, as_json=as_json), as_json=as_json)


@storage_app.command("remove")
def storage_remove(state_dir: StateDir = None, as_json: Json = False) -> int:
    """Take that file system away again. There must be no sandboxes and no checkpoints."""
    from atoll.surfaces.cli import storage as does

    return finish(lambda: does.remove(state_dir, as_json=as_json), as_json=as_json)


@app.command(cls=MayHaveAddress)
def mcp(  # noqa: PLR0913, PLR0917 - options are parameters to typer
    tools: Annotated[
        str,
        typer.Option("--tools", metavar="NAMES", help=f"Vocabularies, separated by commas: {summary()}."),
    ] = "agent",
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="[ADDRESS:PORT]",
            help="Serve many clients here, at /mcp; alone it is 127.0.0.1:8000.  [default: one, on standard streams]",
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session", metavar="NAME", help="Keep the sandboxes until next time.  [default: they end with the client]"
        ),
    ] = None,
    idle: Annotated[
        float | None,
        typer.Option(
            "--idle",
            metavar="TIME",
            parser=values.duration,
            help="With --http: end a client's session that is not used for so long.  [default: 30m]",
        ),
    ] = None,
    image: Image = None,
    runtime: RuntimeOption = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    open_files: OpenFiles = None,
    disk: Disk = None,
    env: Env = None,
    allow: Allow = None,
    secret: Secrets = None,
    secret_env: SecretEnv = None,
    state_dir: StateDir = None,
) -> int:
    """Give a client that speaks MCP sandboxes of its own.

    It is the client that starts this, with what it is configured for; each has a session whose sandboxes nobody else
    sees. With --http it is a server for many. Others than this machine's are served only with a token, which is what
    $ATOLL_MCP_TOKEN says.

    \b
    atoll mcp --tools coding --allow registries
    atoll mcp --http 127.0.0.1:9000 --tools agent,sprites
    """
    if http is not None and session is not None:
        raise InvalidRequest("--session is for one client; with --http each has a session of its own")
    if http is None and idle is not None:
        raise InvalidRequest("--idle goes with --http; on standard streams a session ends with its client")
    variables = values.environment(env or [])
    hidden = _hidden(secret or [], secret_env or [])
    if http is None and any(word.source == "-" for each in hidden for word in each):
        raise InvalidRequest("standard input is the client's: give secrets by a variable or file:PATH")
    from atoll.settings import where_to_listen
    from atoll.surfaces.cli import mcp as does, network, sandboxes
    from atoll.tools.vocabularies import choose

    policy = network.policy(allow or [])
    making = sandboxes.SandboxOptions(
        image, runtime, memory, cpus, pids, open_files, disk, variables, None, policy, *hidden
    )
    words = choose(filter(None, map(str.strip, tools.split(","))))
    try:
        serving = does.McpOptions(words, session, None if http is None else where_to_listen(http), idle)
    except ValueError as error:
        raise InvalidRequest(f"--http {http}: {error}") from None
    return finish(lambda: does.mcp(state_dir, making, serving))


@app.command()
def agent(  # noqa: PLR0913, PLR0917 - options are parameters to typer
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="What is asked, - being standard input.  [default: what is piped in, or typed turn by turn]",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="anthropic:NAME, bedrock:NAME, openai:NAME or script:FILE.  [default: $ATOLL_MODEL, else one of "
            "Anthropic's]",
        ),
    ] = None,
    tools: Annotated[
        str,
        typer.Option("--tools", metavar="NAMES", help=f"Vocabularies, separated by commas: {summary()}."),
    ] = "agent",
    instructions: Annotated[
        str | None,
        typer.Option("--instructions", metavar="TEXT", help="What the model is told to be; @FILE reads it."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="How often the model is asked in a turn.")] = 50,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Stop when so many are used, children's included.")
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session", metavar="NAME", help="Keep the sandboxes until next time.  [default: they end with this]"
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option("--history", metavar="FILE", help="Go on with the conversation in it, and keep it there."),
    ] = None,
    ask: Annotated[bool, typer.Option("--ask", help="Ask before each call that may destroy something.")] = False,
    image: Image = None,
    runtime: RuntimeOption = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    open_files: OpenFiles = None,
    disk: Disk = None,
    env: Env = None,
    allow: Allow = None,
    secret: Secrets = None,
    secret_env: SecretEnv = None,
    user: User = None,
    state_dir: StateDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as a line of JSON, errors too.")] = False,
) -> int:
    """Have a model work in sandboxes of its own, and watch it.

    What it says goes to standard output, what it does to standard error. Without PROMPT, on a terminal, it is a
    conversation: Ctrl-C ends a turn and all that runs in it, an empty line ends the conversation.

    \b
    atoll agent "How fast is this machine's disk?"
    atoll agent --tools coding --session fix --history fix.json --ask "Make the tests pass"
    """
    variables = values.environment(env or [])
    hidden = _hidden(secret or [], secret_env or [])
    try:
        import atoll.agents  # noqa: F401
    except ImportError as error:
        raise InvalidRequest(str(error)) from error
    from atoll.surfaces.cli import agent as does, network, sandboxes

    policy = network.policy(allow or [])
    making = sandboxes.SandboxOptions(
        image, runtime, memory, cpus, pids, open_files, disk, variables, user, policy, *hidden
    )
    asked = does.Asked(prompt, model, tools, instructions, steps, tokens, session, history, ask, as_json)
    plan = does.plan(asked, stdin_is_taken=any(word.source == "-" for each in hidden for word in each))
    return finish(lambda: does.converse(state_dir, making, plan), as_json=as_json)


@app.command()
def doctor(state_dir: StateDir = None, as_json: Json = False) -> int:
    """Tell what this machine can do, and how to mend what it lacks."""
    from atoll.surfaces.cli import sandboxes

    return finish(lambda: sandboxes.doctor(state_dir, as_json=as_json), as_json=as_json)


@app.command()
def version(as_json: Json = False) -> int:
    """Print the version."""
    if as_json:
        render.emit_json({"version": _version()})
    else:
        render.say(f"atoll {_version()}")
    return 0


def _command(words: list[str] | None, line: str | None) -> str | list[str]:
    """The words of a command or a shell line: exactly one of them is given."""
    if words and line is not None:
        raise InvalidRequest(f"both a shell line (-c) and a command ({words[0]}) were given; give one of them")
    if line is not None:
        return line
    if not words:
        raise InvalidRequest("no command was given; write it after --, or a shell line after -c")
    return words


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version as installed

    try:
        return installed("atoll")
    except PackageNotFoundError:
        return "unknown (not installed)"
