"""Clients of a server that is killed again and again: what they do, and what must be true of it afterwards.

Each client has sandboxes of its own and does one thing after the other to them. What breaks off it sends again, with
the same key where there is one, until there is an answer: so it knows of each thing that it was done, was not, or that
nobody can tell. Of the last kind it looks, and from then on it must stay as it was seen. Refuses to know when the
server is killed, and what belongs to no sandbox (`test_server_chaos.py`).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import httpx2

import atoll
from atoll.testing.waiting import SLOWNESS
from tests.chaos.model import Broken

BOUND_S = 60.0 * SLOWNESS
"""Within this a request is answered, however often the server is killed meanwhile."""
MOST_SANDBOXES, MOST_CHECKPOINTS = 4, 4
GIVEN_UP = 0.3
"""How many of the calls that can be undone are cancelled."""
WEIGHTS = {
    "create": 4,
    "append": 10,
    "write": 6,
    "checkpoint": 3,
    "restore": 2,
    "fork": 2,
    "sleep": 2,
    "pause": 1,
    "wake": 1,
    "label": 3,
    "destroy": 2,
    "delete": 1,
}
LOG, FILE = "/home/user/log", "/home/user/file"
T = TypeVar("T")
STATUSES = {"sleep": "sleeping", "pause": "paused", "wake": "running"}


class OutcomeHidden(Exception):
    """It was done, or it was not: nobody knows."""


class NotMade(Exception):
    """It was given up, and nothing of it may be left."""


@dataclass
class Contents:
    lines: list[str] = field(default_factory=list)
    """Of the log, each by an operation of its own."""
    file: str | None = None


@dataclass
class Sandbox:
    id: str
    contents: Contents = field(default_factory=Contents)
    label: str | None = None
    status: str = "running"


@dataclass
class Checkpoint:
    id: str
    contents: Contents


class Hands(ABC):
    """How a client does things. What may or may not have been done is `OutcomeHidden`.

    What is made is made once, or not at all: then it is `NotMade`. After `give_up_s` a call that makes something is
    cancelled, where that undoes it.
    """

    undoes = False
    """Whether a call that is cancelled leaves nothing."""

    @abstractmethod
    async def create(self, name: str | None, owner: str, give_up_s: float | None) -> tuple[str, str]: ...
    @abstractmethod
    async def append(self, name: str, line: str) -> None: ...
    @abstractmethod
    async def write(self, name: str, text: str) -> None: ...
    @abstractmethod
    async def read(self, name: str, path: str) -> str | None: ...
    @abstractmethod
    async def checkpoint(self, name: str, label: str) -> str: ...
    @abstractmethod
    async def checkpoints(self) -> dict[str, str]: ...
    @abstractmethod
    async def delete(self, checkpoint: str) -> None: ...
    @abstractmethod
    async def restore(self, name: str, checkpoint: str) -> None: ...
    @abstractmethod
    async def fork(self, name: str, names: list[str], give_up_s: float | None) -> dict[str, str]: ...
    @abstractmethod
    async def verb(self, name: str, verb: str) -> None: ...
    @abstractmethod
    async def label(self, name: str, value: str) -> None: ...
    @abstractmethod
    async def destroy(self, name: str) -> None: ...
    @abstractmethod
    async def list(self) -> dict[str, dict[str, Any]]: ...


class RestHands(Hands):
    """Over REST, each request with a key of its own where there is one."""

    def __init__(self, url: Callable[[], str], api_key: str, tenant: str, draw: random.Random) -> None:
        self._url = url
        self._draw = draw
        headers = {"X-API-Key": api_key, "Atoll-Tenant": tenant}
        self._client = httpx2.AsyncClient(headers=headers, timeout=BOUND_S, trust_env=False)
        self.audited: set[str] = set()
        """The ids of requests that changed something and were answered: each must be in the audit log."""

    async def aclose(self) -> None:
        await self._client.aclose()

    async def ask(
        self, method: str, path: str, body: Any = None, *, with_key: bool = False, **options: Any
    ) -> httpx2.Response:
        """The answer, however long that takes. A request that is lost is sent again."""
        if with_key:
            options["headers"] = {"Idempotency-Key": self._draw.randbytes(12).hex()}
        if body is not None:
            options["json"] = body
        answer, repeated = await self._send(method, path, options)
        if method == "DELETE" and answer.status_code == 404 and repeated:
            return answer  # by the request whose answer was lost
        if _is_unknown(answer):
            again, _ = await self._send(method, path, options)
            if not _is_unknown(again):
                raise Broken(f"{method} {path} had an unknown outcome, then {again.status_code}: {again.text}")
            raise OutcomeHidden
        if not answer.is_success:
            raise Broken(f"{method} {path} was answered with {answer.status_code}: {answer.text}")
        return answer

    async def _send(self, method: str, path: str, options: dict[str, Any]) -> tuple[httpx2.Response, bool]:
        """The answer, and whether the request was sent several times."""
        repeated = False
        with anyio.fail_after(BOUND_S):
            while True:
                try:
                    answer = await self._client.request(method, f"{self._url()}/api/v1/{path}", **options)
                except httpx2.TransportError:
                    repeated = True
                    await anyio.sleep(0.02)
                    continue
                if method not in ("GET", "HEAD"):
                    self.audited.add(answer.headers["atoll-request-id"])
                return answer, repeated

    async def create(self, name: str | None, owner: str, give_up_s: float | None) -> tuple[str, str]:
        body = {"labels": {"owner": owner}, **({"name": name} if name else {})}
        made = (await self.ask("POST", "sandboxes", body, with_key=True)).json()
        return made["name"], made["id"]

    async def append(self, name: str, line: str) -> None:
        command = f"echo {line} >> {LOG}"
        done = (await self.ask("POST", f"sandboxes/{name}/exec", {"command": command}, with_key=True)).json()
        if done["exit_code"] != 0:
            raise Broken(f"{command} in {name}: {done}")

    async def write(self, name: str, text: str) -> None:
        await self.ask("PUT", f"sandboxes/{name}/files", params={"path": FILE}, content=text.encode())

    async def read(self, name: str, path: str) -> str | None:
        body = {"command": f"cat {path} 2>/dev/null || echo none"}
        said: str = (await self.ask("POST", f"sandboxes/{name}/exec", body)).json()["stdout"]
        return None if said == "none\n" else said

    async def checkpoint(self, name: str, label: str) -> str:
        made = await self.ask("POST", f"sandboxes/{name}/checkpoints", {"label": label}, with_key=True)
        id: str = made.json()["id"]
        return id

    async def checkpoints(self) -> dict[str, str]:
        found = (await self.ask("GET", "checkpoints", params={"limit": 1000})).json()["items"]
        return {each["label"]: each["id"] for each in found}

    async def delete(self, checkpoint: str) -> None:
        await self.ask("DELETE", f"checkpoints/{checkpoint}")

    async def restore(self, name: str, checkpoint: str) -> None:
        await self.ask("POST", f"sandboxes/{name}/restore", {"checkpoint": checkpoint, "foreign": True})

    async def fork(self, name: str, names: list[str], give_up_s: float | None) -> dict[str, str]:
        made = (await self.ask("POST", f"sandboxes/{name}/fork", {"names": names}, with_key=True)).json()
        return {each["name"]: each["id"] for each in made["items"]}

    async def verb(self, name: str, verb: str) -> None:
        await self.ask("POST", f"sandboxes/{name}/{verb}")

    async def label(self, name: str, value: str) -> None:
        await self.ask("PATCH", f"sandboxes/{name}", {"labels": {"n": value}})

    async def destroy(self, name: str) -> None:
        await self.ask("DELETE", f"sandboxes/{name}")

    async def list(self) -> dict[str, dict[str, Any]]:
        found = (await self.ask("GET", "sandboxes", params={"limit": 1000})).json()["items"]
        return {each["name"]: each for each in found}


class ConnectHands(Hands):
    """Through `atoll.connect`, whose requests are repeated for a while by themselves."""

    undoes = True

    def __init__(self, engine: atoll.Engine) -> None:
        self._engine = engine

    async def _again(self, do: Callable[[], Awaitable[T]]) -> T:
        """For what may be done twice, until it is done."""
        with anyio.fail_after(BOUND_S):
            while True:
                try:
                    return await do()
                except ConnectionError:  # the server is away
                    await anyio.sleep(0.02)

    async def _once(self, make: Callable[[], Awaitable[T]], give_up_s: float | None) -> T:
        """What is made, unless it is given up, by this client or by the engine."""
        with anyio.move_on_after(give_up_s), suppress(ConnectionError):
            return await make()
        raise NotMade

    async def create(self, name: str | None, owner: str, give_up_s: float | None) -> tuple[str, str]:
        name = name or f"{owner}-{random.getrandbits(40):x}"  # whose it is, the events of what is undone tell by it

        async def make() -> atoll.Sandbox:
            return await self._engine.create(name, labels={"owner": owner})

        made = await self._once(make, give_up_s)
        return made.name, made.id

    async def _sandbox(self, name: str) -> atoll.Sandbox:
        return await self._again(lambda: self._engine.get(name))

    async def append(self, name: str, line: str) -> None:
        sandbox = await self._sandbox(name)
        try:
            done = await sandbox.exec(f"echo {line} >> {LOG}")
        except ConnectionError:
            raise OutcomeHidden from None
        if done.exit_code != 0:
            raise Broken(f"echo in {name}: {done}")

    async def write(self, name: str, text: str) -> None:
        sandbox = await self._sandbox(name)
        await self._again(lambda: sandbox.files.write_text(FILE, text))

    async def read(self, name: str, path: str) -> str | None:
        sandbox = await self._sandbox(name)
        try:
            return await self._again(lambda: sandbox.files.read_text(path))
        except FileNotFoundError:
            return None

    async def checkpoint(self, name: str, label: str) -> str:
        try:
            return (await self._engine.checkpoint(name, label)).id
        except (ConnectionError, atoll.OutcomeUnknown):
            raise OutcomeHidden from None

    async def checkpoints(self) -> dict[str, str]:
        return {each.label or "": each.id for each in await self._again(self._engine.checkpoints)}

    async def delete(self, checkpoint: str) -> None:
        with suppress(atoll.CheckpointNotFound):  # its answer was lost
            await self._again(lambda: self._engine.delete_checkpoint(checkpoint))

    async def restore(self, name: str, checkpoint: str) -> None:
        await self._again(lambda: self._engine.restore(name, checkpoint, foreign=True))

    async def fork(self, name: str, names: list[str], give_up_s: float | None) -> dict[str, str]:
        made = await self._once(lambda: self._engine.fork(name, len(names), names=names), give_up_s)
        return {each.name: each.id for each in made}

    async def verb(self, name: str, verb: str) -> None:
        await self._again(lambda: getattr(self._engine, verb)(name))

    async def label(self, name: str, value: str) -> None:
        await self._again(lambda: self._engine.update(name, labels={"n": value}))

    async def destroy(self, name: str) -> None:
        with suppress(atoll.SandboxNotFound):
            await self._again(lambda: self._engine.destroy(name))

    async def list(self) -> dict[str, dict[str, Any]]:
        return {each.name: each.model_dump() for each in await self._again(self._engine.list)}


def _is_unknown(answer: httpx2.Response) -> bool:
    return answer.status_code == 409 and answer.json()["code"] == "outcome_unknown"


class ChaosClient:
    """One client: what it has, and what it does next."""

    def __init__(self, name: str, hands: Hands, draw: random.Random) -> None:
        self._name = name
        self.hands = hands
        self._draw = draw
        self._number = 0
        self.sandboxes: dict[str, Sandbox] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        """By label."""
        self.created: set[str] = set()
        self.destroyed: set[str] = set()
        self.done: Counter[str] = Counter()
        self.hidden: Counter[str] = Counter()

    async def run(self, ended: Callable[[], bool]) -> None:
        while not ended():
            kind = self._choose()
            try:
                await getattr(self, f"_{kind}")()
            except BaseException as error:
                error.add_note(f"{self._name} at {kind} {self._number}; it has {self.sandboxes}")
                raise
            self.done[kind] += 1
            if self._draw.random() < 0.1:
                await self.check()

    def _choose(self) -> str:
        possible = dict(WEIGHTS)
        if not self.sandboxes:
            return "create"
        if len(self.sandboxes) >= MOST_SANDBOXES:
            del possible["create"], possible["fork"]
        if len(self.checkpoints) >= MOST_CHECKPOINTS:
            del possible["checkpoint"]
        if not self.checkpoints:
            del possible["restore"], possible["delete"]
        return self._draw.choices(list(possible), list(possible.values()))[0]

    def _pick(self) -> tuple[str, Sandbox]:
        name = self._draw.choice(sorted(self.sandboxes))
        return name, self.sandboxes[name]

    def _new(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    # ---- what it does ----

    def _give_up_s(self) -> float | None:
        """When a call that makes something is to be cancelled. None: not at all."""
        return self._draw.uniform(0, 0.5) if self.hands.undoes and self._draw.random() < GIVEN_UP else None

    async def _create(self) -> None:
        try:
            name, id = await self.hands.create(self._draw.choice((None, self._new())), self._name, self._give_up_s())
        except NotMade:
            self.hidden["create given up"] += 1
            return
        self.sandboxes[name] = Sandbox(id)
        self.created.add(id)

    async def _append(self) -> None:
        name, box = self._pick()
        line = self._new()
        try:
            await self.hands.append(name, line)
        except OutcomeHidden:
            self.hidden["append"] += 1
            if line in (await self.hands.read(name, LOG) or "").splitlines():
                box.contents.lines.append(line)
        else:
            box.contents.lines.append(line)
        box.status = "running"

    async def _write(self) -> None:
        name, box = self._pick()
        text = f"{self._new()}\n" * self._draw.choice((1, 20_000))
        await self.hands.write(name, text)
        box.contents.file, box.status = text, "running"

    async def _checkpoint(self) -> None:
        name, box = self._pick()
        label = self._new()
        try:
            id = await self.hands.checkpoint(name, label)
        except OutcomeHidden:
            self.hidden["checkpoint"] += 1
            if (found := (await self.hands.checkpoints()).get(label)) is None:
                return
            id = found
        self.checkpoints[label] = Checkpoint(id, _copy(box.contents))
        box.status = ""  # as it was, or running

    async def _restore(self) -> None:
        name, box = self._pick()
        checkpoint = self.checkpoints[self._draw.choice(sorted(self.checkpoints))]
        await self.hands.restore(name, checkpoint.id)
        box.contents, box.status = _copy(checkpoint.contents), ""

    async def _fork(self) -> None:
        name, box = self._pick()
        names = [self._new() for _ in range(self._draw.randint(1, 2))]
        try:
            made = await self.hands.fork(name, names, self._give_up_s())
        except NotMade:
            self.hidden["fork given up"] += 1
            made = {}
        if made and sorted(made) != sorted(names):
            raise Broken(f"of the forks {names} only {sorted(made)} were made")
        for each, id in made.items():
            self.sandboxes[each] = Sandbox(id, _copy(box.contents), box.label, "")
            self.created.add(id)
        box.status = ""

    async def _sleep(self, verb: str = "sleep") -> None:
        name, box = self._pick()
        if verb == "pause" and box.status != "running":
            return
        await self.hands.verb(name, verb)
        box.status = STATUSES[verb]

    async def _pause(self) -> None:
        await self._sleep("pause")

    async def _wake(self) -> None:
        await self._sleep("wake")

    async def _label(self) -> None:
        name, box = self._pick()
        box.label = self._new()
        await self.hands.label(name, box.label)

    async def _destroy(self) -> None:
        name, box = self._pick()
        await self.hands.destroy(name)
        self.destroyed.add(box.id)
        del self.sandboxes[name]

    async def _delete(self) -> None:
        label = self._draw.choice(sorted(self.checkpoints))
        await self.hands.delete(self.checkpoints.pop(label).id)

    # ---- what must be true ----

    async def check(self, *, whole: bool = False) -> None:
        """What it has is there, once; of one sandbox, or of all of them, also the contents."""
        found = {name: info for name, info in (await self.hands.list()).items() if self._owns(info)}
        if found.keys() != self.sandboxes.keys():
            raise Broken(f"{self._name} should have {sorted(self.sandboxes)}, and has {sorted(found)}")
        for name, box in self.sandboxes.items():
            info = found[name]
            seen = info["id"], info["labels"].get("n"), info["status"]
            allowed = (box.status,) if box.status else ("running", "paused", "sleeping")
            if seen[:2] != (box.id, box.label) or seen[2] not in allowed:
                raise Broken(f"{name} is {seen}, and should be {box}")
        labels = {label: id for label, id in (await self.hands.checkpoints()).items() if self._is_mine(label)}
        if labels != {label: each.id for label, each in self.checkpoints.items()}:
            raise Broken(f"{self._name} should have the checkpoints {self.checkpoints}, and has {labels}")
        for name in sorted(self.sandboxes) if whole else [self._pick()[0]] if self.sandboxes else []:
            await self._check_contents(name, self.sandboxes[name])

    async def _check_contents(self, name: str, box: Sandbox) -> None:
        lines = (await self.hands.read(name, LOG) or "").splitlines()
        if lines != box.contents.lines:
            raise Broken(f"the log of {name} has {lines}, and should have {box.contents.lines}")
        if await self.hands.read(name, FILE) != box.contents.file:
            raise Broken(f"the file of {name} should be {(box.contents.file or '')[:60]!r}")
        box.status = "running"

    async def end(self) -> None:
        """Take all of it away, each checkpoint after a look at what it holds."""
        for label, checkpoint in list(self.checkpoints.items()):
            if self.sandboxes:
                name, box = self._pick()
                await self.hands.restore(name, checkpoint.id)
                box.contents = _copy(checkpoint.contents)
                await self._check_contents(name, box)
            await self.hands.delete(checkpoint.id)
            del self.checkpoints[label]
        while self.sandboxes:
            await self._destroy()

    def _owns(self, info: dict[str, Any]) -> bool:
        return bool(info["labels"].get("owner") == self._name)

    def _is_mine(self, label: str) -> bool:
        return label.startswith(f"{self._name}-")


def _copy(contents: Contents) -> Contents:
    return Contents(list(contents.lines), contents.file)
