"""The sprites' vocabulary: sandboxes that are made, checkpointed, restored, forked, shut down and woken by name.

Knows the shapes that clients of it expect: JSON in the text, and `Error: …`. Refuses to know how any of that is done.
A sprite is a sandbox of a session, and no tool here reaches one of another session, or its checkpoints.
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
    SandboxAsleep,
    SandboxNotFound,
)
from atoll.contract.model import Checkpoint, Status
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.sandbox_pool import PooledSandbox, SandboxPool
from atoll.tools.tool import Hints, Input, Result, Tool, ToolResult, ToolSet
from atoll.tools.view import HOME, OUTPUT_LIMIT_BYTES, TIMED_OUT, Session, run
from atoll.tools.vocabularies import Vocabulary

CLONE_S = 300
_CLONE_SHOWN = 2000


class Sprites(Session):
    """A session, whose sandboxes are called sprites here."""

    def explain(self, error: AtollError) -> str:
        return f"Error: {super().explain(error)}"

    async def find(self, wanted: str) -> tuple[str, Sandbox]:
        """The sprite of this name or id: its name, and the sandbox.

        Raises:
            SandboxNotFound: there is none.
        """
        name = wanted
        try:
            return name, await self.pool.find(name)
        except (SandboxNotFound, InvalidRequest):  # an id is no name that a session could have
            known = await self.pool.list()
            names = [each.name for each in known if each.id == wanted]
            if not names:
                raise SandboxNotFound(wanted, [each.name for each in known]) from None
            return names[0], await self.pool.find(names[0])

    async def tell(self, name: str) -> Sprite:
        """What there is to say of a sprite.

        Raises:
            SandboxNotFound: it is gone.
        """
        known = await self.pool.list()
        for each in known:
            if each.name == name:
                return _sprite(each)
        raise SandboxNotFound(name, [each.name for each in known])

    async def checkpoint(self, sandbox: Sandbox, wanted: str) -> Checkpoint:
        """A checkpoint of just this sprite, by id or name: ids of others are worth nothing here.

        Raises:
            CheckpointNotFound: it has none such.
        """
        known = await sandbox.checkpoints()
        for each in reversed(known):
            if wanted in {each.id, each.name}:
                return each
        raise CheckpointNotFound(wanted, [each.id for each in known])


# -------------------------------------------------------------------------------------------------- inputs and results


class Named(Input):
    name: str = Field(min_length=1)
    """Name or id of the sprite."""


class Create(Input):
    name: str = Field(min_length=1)
    """Its name: lower-case letters, digits, '-', '_' and '.', at most 30."""
    repoUrl: str = Field(default="", max_length=2048)
    """A Git repository to clone into its home: https or http, from a host that its network policy allows."""


class Exec(Named):
    command: str = Field(min_length=1)
    timeout: float = Field(default=30000, gt=0, le=3_600_000)
    """Milliseconds until it is killed, with all that it started."""


class MakeCheckpoint(Named):
    checkpointName: str = Field(default="", max_length=63)
    """What to call it: lower-case letters, digits, '-', '_' and '.'."""


class Restore(Named):
    checkpointId: str = Field(min_length=1)
    """Id or name of one of its checkpoints."""


class Fork(Named):
    newName: str = Field(min_length=1)
    """What the new one is called."""
    checkpointId: str = ""
    """Id or name of one of its checkpoints to begin at. Empty: it begins as the sprite is now."""


class Everything(Input):
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


class ExecResult(Result):
    stdout: str
    stderr: str
    exitCode: int
    """124: it ran into its time limit."""
    durationMs: int


class SpriteCheckpoint(Result):
    id: str
    spriteId: str
    name: str | None = None
    createdAt: str
    sizeBytes: int | None = None
    """What was written since the checkpoint before. Unset: that has not been counted yet."""


class CheckpointList(Result):
    checkpoints: list[SpriteCheckpoint]


class Changed(Sprite):
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


def _checkpoint(found: Checkpoint, sprite_id: str) -> SpriteCheckpoint:
    return SpriteCheckpoint(
        id=found.id,
        spriteId=sprite_id,
        name=found.name,
        createdAt=_time(found.created_at),
        sizeBytes=found.size_bytes,
    )


def _array(result: Result, items: list[Any]) -> ToolResult:
    """The text is the array itself; as data it needs a name."""
    whole = result.result()
    return whole.model_copy(update={"content": pydantic_core.to_json([each.dump() for each in items]).decode()})


# ----------------------------------------------------------------------------------------------------------- handlers


async def _create(ask: Create, sprites: Sprites) -> CreatedSprite:
    repository = _repository(ask.repoUrl) if ask.repoUrl else None
    sandbox = await sprites.pool.create(ask.name)
    directory = None
    if repository is not None:
        made = False
        try:
            directory = await _clone(sandbox, ask.repoUrl, repository)
            made = True
        finally:
            if not made:
                with anyio.CancelScope(shield=True):
                    await sprites.pool.destroy(ask.name)
    sprite = await sprites.tell(ask.name)
    return CreatedSprite(**sprite.dump(), directory=directory)


def _repository(url: str) -> str:
    """The name of the directory that a repository is cloned to.

    Raises:
        InvalidRequest: it is not a URL that can be cloned from here.
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


async def _clone(sandbox: Sandbox, url: str, name: str) -> str:
    """Clone a repository inside. Git goes out, if at all, through the proxy that holds the policy.

    Raises:
        CallerError: it did not work; the message says what Git said.
    """
    directory = f"{HOME}/{name}"
    env = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "http:https"}
    ran = await run(sandbox, ["git", "clone", "--quiet", "--", url, directory], cwd=None, timeout_s=CLONE_S, env=env)
    if ran.exit_code == 0:
        return directory
    host = urlsplit(url).hostname
    if ran.exit_code == 127:
        why = "its image has no git; use an image that does"
    elif ran.exit_code == TIMED_OUT:
        why = f"it did not end within {CLONE_S} s"
    elif sandbox.info.network is None:
        why = f"sandboxes of this session have no network; a policy that allows {host} is for whoever runs them to give"
    else:
        why = f"is {host} among what its network policy allows, and the repository there? git said: "
        why += ran.stderr[-_CLONE_SHOWN:].strip()
    raise CallerError(f"{url} could not be cloned, so no sprite was made: {why}")


async def _exec(ask: Exec, sprites: Sprites) -> ExecResult:
    name, sandbox = await sprites.find(ask.name)
    try:
        ran = await run(sandbox, ask.command, cwd=None, timeout_s=ask.timeout / 1000)
    except SandboxAsleep:
        raise SandboxAsleep(f"the sprite {name!r} is shut down; call sprite_wake first") from None
    return ExecResult(
        stdout=ran.stdout, stderr=ran.stderr, exitCode=ran.exit_code, durationMs=round(ran.duration_s * 1000)
    )


async def _make_checkpoint(ask: MakeCheckpoint, sprites: Sprites) -> SpriteCheckpoint:
    _name, sandbox = await sprites.find(ask.name)
    made = await sandbox.checkpoint(ask.checkpointName or None)
    return _checkpoint(await sprites.checkpoint(sandbox, made.id), sandbox.id)  # with its size


async def _restore(ask: Restore, sprites: Sprites) -> Changed:
    name, sandbox = await sprites.find(ask.name)
    checkpoint = await sprites.checkpoint(sandbox, ask.checkpointId)
    await sandbox.restore(checkpoint.id)
    return await _changed(sprites, name, f"{name} is as it was at checkpoint {checkpoint.id}")


async def _list_checkpoints(ask: Named, sprites: Sprites) -> ToolResult:
    _name, sandbox = await sprites.find(ask.name)
    found = [_checkpoint(each, sandbox.id) for each in await sandbox.checkpoints()]
    return _array(CheckpointList(checkpoints=found), found)


async def _list(_ask: Everything, sprites: Sprites) -> ToolResult:
    found = [_sprite(each) for each in await sprites.pool.list()]
    return _array(SpriteList(sprites=found), found)


async def _shutdown(ask: Named, sprites: Sprites) -> Changed:
    name, sandbox = await sprites.find(ask.name)
    await sandbox.shutdown()
    return await _changed(sprites, name, f"{name} is shut down; sprite_wake starts it again")


async def _wake(ask: Named, sprites: Sprites) -> Changed:
    name, sandbox = await sprites.find(ask.name)
    await sandbox.wake()
    return await _changed(sprites, name, f"{name} runs")


async def _changed(sprites: Sprites, name: str, message: str) -> Changed:
    return Changed(**(await sprites.tell(name)).dump(), message=message)


async def _fork(ask: Fork, sprites: Sprites) -> Sprite:
    name, sandbox = await sprites.find(ask.name)
    checkpoint = (await sprites.checkpoint(sandbox, ask.checkpointId)).id if ask.checkpointId else None
    await sprites.pool.fork(name, ask.newName, checkpoint=checkpoint)
    return await sprites.tell(ask.newName)


# --------------------------------------------------------------------------------------------------------- vocabulary


def _tool(name: str, description: str, input: type[Input], result: type[Result], handler: Any, hints: Hints) -> Tool:
    return Tool(name, description, input, result, handler, needs=frozenset({"pool"}), hints=hints, vocabulary="sprites")


_LOOKS = Hints(read_only=True, idempotent=True)

SPRITES = (
    _tool(
        "sprite_create",
        "Make a sandbox, with a Git repository in it if one is named. If that cannot be cloned, there is none. Cloning "
        f"may take {CLONE_S} s.",
        Create,
        CreatedSprite,
        _create,
        Hints(open_world=True),
    ),
    _tool(
        "sprite_exec",
        f"Run a shell command in a sprite. Shows up to {OUTPUT_LIMIT_BYTES // 1024} KiB of each stream, head and tail. "
        "One that takes too long is exit code 124.",
        Exec,
        ExecResult,
        _exec,
        Hints(destructive=True, open_world=True),
    ),
    _tool(
        "sprite_checkpoint",
        "Remember a sprite as it is now, to go back to or to fork. It goes on.",
        MakeCheckpoint,
        SpriteCheckpoint,
        _make_checkpoint,
        Hints(),
    ),
    _tool(
        "sprite_restore",
        "Take a sprite back to one of its checkpoints. What was written since is lost, and what runs ends.",
        Restore,
        Changed,
        _restore,
        Hints(destructive=True, idempotent=True),
    ),
    _tool(
        "sprite_list_checkpoints",
        "List the checkpoints of a sprite, the oldest first.",
        Named,
        CheckpointList,
        _list_checkpoints,
        _LOOKS,
    ),
    _tool("sprite_list", "List the sprites, with their status.", Everything, SpriteList, _list, _LOOKS),
    _tool(
        "sprite_shutdown",
        "Stop a sprite and keep its files. It stays down until sprite_wake.",
        Named,
        Changed,
        _shutdown,
        Hints(destructive=True, idempotent=True),
    ),
    _tool("sprite_wake", "Start a sprite that sleeps or is shut down.", Named, Changed, _wake, Hints(idempotent=True)),
    _tool(
        "sprite_fork",
        "Make a sprite that begins as another one is, or was at one of its checkpoints. Both go their own ways.",
        Fork,
        Sprite,
        _fork,
        Hints(),
    ),
)


def sprite_tools(pool: SandboxPool) -> ToolSet:
    """The sprites' tools for the sandboxes of a session."""
    return ToolSet(SPRITES, Sprites(pool))


VOCABULARY = Vocabulary(
    tools=lambda pool, _tasks: sprite_tools(pool),
    instructions="Make a sprite before you use it; a checkpoint is a way back to how it was.",
    transcripts={
        "sprite_create": "{repoUrl}",
        "sprite_exec": "$ {command}",
        "sprite_checkpoint": "{checkpointName}",
        "sprite_restore": "{checkpointId}",
        "sprite_fork": "→ {newName}",
    },
    sandbox_argument="name",
)
