"""The vocabulary `sprites`: create, checkpoint, restore, fork, shut down and wake sandboxes by name.

Owns the shapes that its clients expect: JSON in the text, and `Error: …`. Not here: how a checkpoint or a fork is made
(`runtime/`). Used through `vocabularies.py` by the surfaces, and by programs (`sprite_tools`).

A sprite is a sandbox of a session. No tool here can reach a sprite of another session, or its checkpoints.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import anyio
import pydantic_core
from pydantic import Field

from atoll.contract.errors import (
    AtollError,
    CallerError,
    CheckpointNotFound,
    InvalidRequest,
    SandboxNotFound,
    SandboxShutdown,
)
from atoll.contract.model import Checkpoint, Status
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.sandbox_pool import NAME_RULE, PooledSandbox, SandboxPool
from atoll.tools.tool import Hints, Input, OnOutput, Result, Tool, ToolResult, ToolSet
from atoll.tools.view import HOME, SHELL_FACTS, TIMED_OUT_EXIT_CODE, PoolContext, run, with_note
from atoll.tools.vocabularies import Vocabulary

MAX_CLONE_S = 300
DEFAULT_TIMEOUT_MS = 30_000
_MAX_CLONE_ERROR_CHARS = 2000


class SpriteContext(PoolContext):
    """The sandboxes of a session, which this vocabulary calls sprites."""

    def explain(self, error: AtollError) -> str:
        return f"Error: {super().explain(error)}"

    async def find(self, wanted: str) -> tuple[str, Sandbox]:
        """Find a sprite by name or id. Returns its name and the sandbox.

        Raises:
            SandboxNotFound: there is no such sprite in this session.
        """
        name = wanted
        try:
            return name, await self.pool.find(name)
        except (SandboxNotFound, InvalidRequest):  # an id is not a valid name in a session
            known = await self.pool.list()
            names = [each.name for each in known if each.id == wanted]
            if not names:
                raise SandboxNotFound(wanted, [each.name for each in known]) from None
            return names[0], await self.pool.find(names[0])

    async def describe(self, name: str) -> Sprite:
        """The name, id, status and times of a sprite.

        Raises:
            SandboxNotFound: it does not exist any more.
        """
        known = await self.pool.list()
        for each in known:
            if each.name == name:
                return _sprite(each)
        raise SandboxNotFound(name, [each.name for each in known])

    async def checkpoint(self, sandbox: Sandbox, wanted: str) -> Checkpoint:
        """Find a checkpoint of this sprite by id or name. Checkpoints of other sprites are not found.

        Raises:
            CheckpointNotFound: the sprite has no such checkpoint.
        """
        known = await sandbox.checkpoints()
        for each in reversed(known):
            if wanted in {each.id, each.label}:
                return each
        raise CheckpointNotFound(wanted, {each.id: each.label for each in known})


# -------------------------------------------------------------------------------------------------- inputs and results


class SpriteInput(Input):
    name: str = Field(min_length=1)
    """Name or id of the sprite."""


class SpriteCreate(Input):
    name: str = Field(min_length=1, description=f"Its name: {NAME_RULE}.")
    repoUrl: str = Field(default="", max_length=2048)
    """A Git repository to clone into its home: https or http, from a host that its network policy allows."""


class SpriteExec(SpriteInput):
    command: str = Field(min_length=1)
    """A command line for the shell. It begins in /home/user, as the sprite's user."""
    timeout: float = Field(default=DEFAULT_TIMEOUT_MS, gt=0, le=3_600_000)
    """In milliseconds, not seconds: how long until it is killed, with all that it started. Raise it for installs,
    builds and tests, for instance to 600000."""


class SpriteCheckpointInput(SpriteInput):
    checkpointName: str = Field(default="", max_length=63)
    """What to call it: lower-case letters, digits, '-', '_' and '.'."""


class SpriteRestore(SpriteInput):
    checkpointId: str = Field(min_length=1)
    """Id or name of one of its checkpoints."""


class SpriteFork(SpriteInput):
    newName: str = Field(min_length=1)
    """The name of the new sprite, by the same rule as that of any other."""
    checkpointId: str = ""
    """Id or name of one of its checkpoints to fork from. Empty: the sprite as it is now."""


class SpriteListInput(Input):
    pass


class Sprite(Result):
    id: str
    name: str
    status: Status
    lastActivityAt: str
    createdAt: str


class CreatedSprite(Sprite):
    directory: str | None = None
    """Where the repository was cloned to. Unset: none was."""


class SpriteList(Result):
    sprites: list[Sprite]


class SpriteExecResult(Result):
    stdout: str
    stderr: str
    exitCode: int
    """124: it timed out."""
    durationMs: int


class SpriteCheckpoint(Result):
    id: str
    spriteId: str
    name: str | None = None
    createdAt: str
    sizeBytes: int | None = None
    """What was written since the checkpoint before. Unset: that has not been counted yet."""


class SpriteCheckpointList(Result):
    checkpoints: list[SpriteCheckpoint]


class ChangedSprite(Sprite):
    message: str


class DestroyedSprite(Result):
    name: str
    message: str


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _sprite(found: PooledSandbox) -> Sprite:
    return Sprite(
        id=found.id,
        name=found.name,
        status=found.status,
        lastActivityAt=_time(found.last_used_at or found.created_at),
        createdAt=_time(found.created_at),
    )


def sprite_checkpoint(found: Checkpoint, sprite_id: str) -> SpriteCheckpoint:
    return SpriteCheckpoint(
        id=found.id,
        spriteId=sprite_id,
        name=found.label,
        createdAt=_time(found.created_at),
        sizeBytes=found.size_bytes,
    )


def _array(result: Result, items: list[Any]) -> ToolResult:
    """The text is the JSON array itself. The data is an object, with the array in a field."""
    whole = result.result()
    return whole.model_copy(update={"content": pydantic_core.to_json([each.dump() for each in items]).decode()})


# ----------------------------------------------------------------------------------------------------------- handlers


async def _create(args: SpriteCreate, context: SpriteContext, *, on_output: OnOutput | None) -> CreatedSprite:
    repository = _repository(args.repoUrl) if args.repoUrl else None
    sandbox = await context.pool.create(args.name)
    directory = None
    if repository is not None:
        made = False
        try:
            directory = await _clone(sandbox, args.repoUrl, repository, on_output)
            made = True
        finally:
            if not made:
                with anyio.CancelScope(shield=True):
                    await context.pool.destroy(args.name)
    sprite = await context.describe(args.name)
    return CreatedSprite(**sprite.dump(), directory=directory)


def _repository(url: str) -> str:
    """The name of the directory for a clone of this repository.

    Raises:
        InvalidRequest: it is not an http or https URL.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
        parts = urlsplit("")
    if parts.scheme not in {"https", "http"} or not host or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise InvalidRequest(
            f"repoUrl is {url[:200]!r}; it must be an https or http URL, such as https://example.org/owner/project.git"
        )
    name = parts.path.rstrip("/").rpartition("/")[2].removesuffix(".git")
    return name if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name) else "repository"


async def _clone(sandbox: Sandbox, url: str, name: str, on_output: OnOutput | None) -> str:
    """Clone a repository inside the sandbox. Git connects through the egress proxy, which enforces the policy.

    Raises:
        CallerError: the clone failed; the message has the reason and what Git printed.
    """
    directory = f"{HOME}/{name}"
    env = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "http:https"}
    command = ["git", "clone", "--quiet", "--", url, directory]
    ran = await run(sandbox, command, cwd=None, timeout_s=MAX_CLONE_S, env=env, on_output=on_output)
    if ran.exit_code == 0:
        return directory
    host = urlsplit(url).hostname
    if ran.exit_code == 127:
        why = "its image has no git; use an image that has it"
    elif ran.exit_code == TIMED_OUT_EXIT_CODE:
        why = f"git clone timed out after {MAX_CLONE_S} s"
    elif sandbox.info.network is None:
        why = f"sandboxes of this session have no network; the operator has to allow {host} in the network policy"
    else:
        why = f"check that the network policy allows {host} and that the repository exists. git printed: "
        why += ran.stderr[-_MAX_CLONE_ERROR_CHARS:].strip()
    raise CallerError(f"{url} could not be cloned, so no sprite was created: {why}")


async def _exec(args: SpriteExec, context: SpriteContext, *, on_output: OnOutput | None) -> SpriteExecResult:
    name, sandbox = await context.find(args.name)
    try:
        ran = await run(
            sandbox,
            args.command,
            cwd=None,
            timeout_s=args.timeout / 1000,
            timeout_name="timeout",
            on_output=on_output,
        )
    except SandboxShutdown:
        raise SandboxShutdown(f"the sprite {name!r} is shut down; call sprite_wake first") from None
    return SpriteExecResult(
        stdout=ran.stdout,
        stderr=with_note(ran.stderr, ran.note),
        exitCode=ran.exit_code,
        durationMs=round(ran.duration_s * 1000),
    )


async def _make_checkpoint(args: SpriteCheckpointInput, context: SpriteContext) -> SpriteCheckpoint:
    _name, sandbox = await context.find(args.name)
    made = await sandbox.checkpoint(args.checkpointName or None)
    return sprite_checkpoint(await context.checkpoint(sandbox, made.id), sandbox.id)  # with its size


async def _restore(args: SpriteRestore, context: SpriteContext) -> ChangedSprite:
    name, sandbox = await context.find(args.name)
    checkpoint = await context.checkpoint(sandbox, args.checkpointId)
    await sandbox.restore(checkpoint.id)
    return await _changed(context, name, f"{name} is restored to checkpoint {checkpoint.id}")


async def _list_checkpoints(args: SpriteInput, context: SpriteContext) -> ToolResult:
    _name, sandbox = await context.find(args.name)
    found = [sprite_checkpoint(each, sandbox.id) for each in await sandbox.checkpoints()]
    return _array(SpriteCheckpointList(checkpoints=found), found)


async def _list(_args: SpriteListInput, context: SpriteContext) -> ToolResult:
    found = [_sprite(each) for each in await context.pool.list()]
    return _array(SpriteList(sprites=found), found)


async def _shutdown(args: SpriteInput, context: SpriteContext) -> ChangedSprite:
    name, sandbox = await context.find(args.name)
    await sandbox.shutdown()
    return await _changed(context, name, f"{name} is shut down; sprite_wake starts it again")


async def _wake(args: SpriteInput, context: SpriteContext) -> ChangedSprite:
    name, sandbox = await context.find(args.name)
    await sandbox.wake()
    return await _changed(context, name, f"{name} is running")


async def _destroy(args: SpriteInput, context: SpriteContext) -> DestroyedSprite:
    name, _sandbox = await context.find(args.name)
    count = await context.pool.destroy(name, checkpoints=True)
    checkpoints = f"{count} checkpoint{'' if count == 1 else 's'}"
    return DestroyedSprite(name=name, message=f"{name} is destroyed, with its files and {checkpoints}")


async def _changed(context: SpriteContext, name: str, message: str) -> ChangedSprite:
    return ChangedSprite(**(await context.describe(name)).dump(), message=message)


async def _fork(args: SpriteFork, context: SpriteContext) -> Sprite:
    name, sandbox = await context.find(args.name)
    checkpoint = (await context.checkpoint(sandbox, args.checkpointId)).id if args.checkpointId else None
    await context.pool.fork(name, args.newName, checkpoint=checkpoint)
    return await context.describe(args.newName)


# --------------------------------------------------------------------------------------------------------- vocabulary


def _tool(
    name: str,
    title: str,
    description: str,
    input: type[Input],
    result: type[Result],
    handler: Any,
    hints: Hints,
    *,
    streams_output: bool = False,
) -> Tool:
    return Tool(
        name,
        description,
        input,
        result,
        handler,
        needs=frozenset({"pool"}),
        hints=hints,
        streams_output=streams_output,
        title=title,
        vocabulary="sprites",
    )


_READ_ONLY = Hints(read_only=True, idempotent=True)

SPRITE_TOOLS = (
    _tool(
        "sprite_create",
        "Create sprite",
        "Create a sprite: a sandbox, with files and processes of its own, that can be saved as a checkpoint, restored "
        "and forked. With repoUrl, a Git repository is cloned into it; if that fails, nothing is created. Cloning may "
        f"take {MAX_CLONE_S} s.",
        SpriteCreate,
        CreatedSprite,
        _create,
        Hints(open_world=True),
        streams_output=True,
    ),
    _tool(
        "sprite_exec",
        "Run command in sprite",
        "Run a shell command in a sprite and wait for its end. "
        + SHELL_FACTS.format(timeout="timeout", seconds=f"{DEFAULT_TIMEOUT_MS} ms"),
        SpriteExec,
        SpriteExecResult,
        _exec,
        Hints(destructive=True, open_world=True),
        streams_output=True,
    ),
    _tool(
        "sprite_checkpoint",
        "Save checkpoint",
        "Save the state of a sprite as a checkpoint, to restore or to fork. The sprite keeps running.",
        SpriteCheckpointInput,
        SpriteCheckpoint,
        _make_checkpoint,
        Hints(),
    ),
    _tool(
        "sprite_restore",
        "Restore checkpoint",
        "Restore a sprite to one of its checkpoints. What was written since is lost, and running processes end.",
        SpriteRestore,
        ChangedSprite,
        _restore,
        Hints(destructive=True, idempotent=True),
    ),
    _tool(
        "sprite_list_checkpoints",
        "List checkpoints",
        "List the checkpoints of a sprite, the oldest first.",
        SpriteInput,
        SpriteCheckpointList,
        _list_checkpoints,
        _READ_ONLY,
    ),
    _tool(
        "sprite_list",
        "List sprites",
        "List the sprites of this session, with their status.",
        SpriteListInput,
        SpriteList,
        _list,
        _READ_ONLY,
    ),
    _tool(
        "sprite_shutdown",
        "Shut down sprite",
        "End the processes of a sprite and keep its files. It stays down until sprite_wake.",
        SpriteInput,
        ChangedSprite,
        _shutdown,
        Hints(destructive=True, idempotent=True),
    ),
    _tool(
        "sprite_wake",
        "Start sprite",
        "Start a sprite that sleeps or is shut down.",
        SpriteInput,
        ChangedSprite,
        _wake,
        Hints(idempotent=True),
    ),
    _tool(
        "sprite_fork",
        "Fork sprite",
        "Create a copy of a sprite, as it is now or as it was at one of its checkpoints. The two are independent.",
        SpriteFork,
        Sprite,
        _fork,
        Hints(),
    ),
    _tool(
        "sprite_destroy",
        "Destroy sprite",
        "Remove a sprite for good, with its files and checkpoints. Its forks are not touched.",
        SpriteInput,
        DestroyedSprite,
        _destroy,
        Hints(destructive=True, idempotent=True),
    ),
)


def sprite_tools(pool: SandboxPool) -> ToolSet:
    """The tools of the vocabulary `sprites` for the sandboxes of a session."""
    return ToolSet(SPRITE_TOOLS, SpriteContext(pool))


VOCABULARY = Vocabulary(
    tools=lambda pool, _grants: sprite_tools(pool),
    instructions="A sprite is a sandbox with checkpoints: create it with sprite_create before you use it; "
    "sprite_restore takes it back to one of its checkpoints, and sprite_fork makes a copy. Time-outs of sprite_exec "
    "are in milliseconds.",
    transcripts={
        "sprite_create": "{repoUrl}",
        "sprite_exec": "$ {command}",
        "sprite_checkpoint": "{checkpointName}",
        "sprite_restore": "{checkpointId}",
        "sprite_fork": "→ {newName}",
    },
    sandbox_argument="name",
)
