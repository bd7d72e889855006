"""Templates on disk: named beginnings of sandboxes, each a checkpoint and what its sandboxes have.

Owns `templates/<name>.json`, in which a name has versions by tag; `<name>` has the namespace in it, unless that is the
default (`namespaces.py`). `engine.templates`. Not here: how one is built (`atoll.builds`), and how a sandbox begins as
one (`provisioning.py`). A template whose checkpoint was deleted stays until it is removed or built again.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import anyio

from atoll.contract.errors import InvalidRequest, SandboxError, TemplateNotFound
from atoll.contract.model import Template, TemplateVersion
from atoll.contract.names import DEFAULT_TAG, TEMPLATE_PREFIX, check_name, is_name, split_template
from atoll.drivers.locks import locked
from atoll.runtime.state.namespaces import names_in
from atoll.runtime.state.records import StoredRecord, read_record, remove_record, unreadable, write_record
from atoll.runtime.state.status import modified
from atoll.runtime.state.store import StateStore, now

MAX_TAGS = 64
"""Of one template."""
_LOCK_TIMEOUT_S = 10


class TemplateRecord(StoredRecord):
    """The record of a template."""

    VERSION = 1
    template: Template


class TemplateStore:
    """The templates of one namespace of a state directory."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._root = store.state_dir / "templates"

    # ---- public ----

    async def list(self) -> builtins.list[Template]:
        """All templates, by name. One whose record cannot be read has a `reason`, and can only be removed."""
        return await anyio.to_thread.run_sync(self._list)

    async def get(self, name: str) -> Template:
        """The template of this name.

        Raises:
            TemplateNotFound: there is none.
            SandboxError: its record cannot be read.
        """
        return self._read(name)

    async def version(self, reference: str) -> TemplateVersion:
        """What `NAME` or `NAME:TAG` means, also with `template:` in front.

        Raises:
            InvalidRequest: it is not a reference of a template.
            TemplateNotFound: there is no such template, or it has no such tag.
            SandboxError: its record cannot be read.
        """
        name, tag = split_template(reference)
        template = self._read(name)
        found = template.versions.get(tag)
        if found is None:
            raise TemplateNotFound(f"{name}:{tag}", [f"{name}:{each}" for each in template.versions])
        return found

    async def remove(self, reference: str) -> None:
        """Remove a template, or with `NAME:TAG` one of its versions. Sandboxes that began as it stay.

        Raises:
            TemplateNotFound: there is none.
        """
        name, tag = split_template(reference)
        if ":" not in reference.removeprefix(TEMPLATE_PREFIX):
            if name not in self._names():
                raise TemplateNotFound(name, self._names())
            remove_record(self._path(name))
            return
        await self.untag(name, [tag])

    async def tag(self, reference: str, tags: Sequence[str]) -> None:
        """Let a template have the version that `NAME` or `NAME:TAG` means under these tags, too.

        Raises:
            TemplateNotFound: there is no such version.
            InvalidRequest: a tag is not allowed, or there would be too many.
        """
        version = await self.version(reference)
        await self.put(split_template(reference)[0], tags, version)

    # ---- for builds ----

    async def put(self, name: str, tags: Sequence[str], version: TemplateVersion) -> None:
        """Let a template have this version under these tags, in place of what had them.

        Raises:
            InvalidRequest: a name or a tag is not allowed, or there would be too many tags.
        """
        check_name(name, noun="a name for a template")
        for tag in tags:
            check_name(tag, noun="a tag for a template")
        await self._change(name, lambda before: {**before, **dict.fromkeys(tags, version)}, made=True)

    async def untag(self, name: str, tags: Sequence[str]) -> None:
        """Remove versions of a template. Without any it is removed.

        Raises:
            TemplateNotFound: there is none, or it has not all of these.
        """

        def without(before: dict[str, TemplateVersion]) -> dict[str, TemplateVersion]:
            if missing := [tag for tag in tags if tag not in before]:
                raise TemplateNotFound(f"{name}:{missing[0]}", [f"{name}:{each}" for each in before])
            return {tag: each for tag, each in before.items() if tag not in tags}

        await self._change(name, without)

    def checkpoints(self) -> set[str]:
        """The checkpoints that templates need.

        Raises:
            SandboxError: a record cannot be read.
        """
        templates = [self._read(name) for name in self._names()]
        return {version.checkpoint for each in templates for version in each.versions.values()}

    # ---- records ----

    async def _change(
        self,
        name: str,
        change: Callable[[dict[str, TemplateVersion]], dict[str, TemplateVersion]],
        *,
        made: bool = False,
    ) -> None:
        self._root.mkdir(mode=0o700, exist_ok=True)
        async with locked(self._store.state_dir / "templates.lock", _LOCK_TIMEOUT_S, "changing a template"):
            try:
                template = self._read(name)
            except TemplateNotFound:
                if not made:
                    raise
                template = Template(name=name, created_at=now())
            versions = change(template.versions)
            if len(versions) > MAX_TAGS:
                raise InvalidRequest(f"the template {name!r} would have {len(versions)} tags; it may have {MAX_TAGS}")
            if versions:
                record = TemplateRecord(template=template.model_copy(update={"versions": versions}))
                write_record(self._path(name), record, durable=True)
            else:
                remove_record(self._path(name))

    def _list(self) -> builtins.list[Template]:
        return [self._describe(name) for name in sorted(self._names())]

    def _describe(self, name: str) -> Template:
        try:
            return self._read(name)
        except SandboxError as error:
            return Template(name=name, created_at=modified(self._path(name), self._root), reason=unreadable(error))

    def _read(self, name: str) -> Template:
        record = read_record(self._path(name), TemplateRecord, f"template {name}") if is_name(name) else None
        if record is None:
            raise TemplateNotFound(name, sorted(self._names()))
        return record.template

    def _names(self) -> builtins.list[str]:
        return names_in(self._store.namespace, _stems(self._root))

    def _path(self, name: str) -> Path:
        return self._root / f"{self._store.entry(name)}.json"


def reference_of(name: str, tag: str = DEFAULT_TAG) -> str:
    """As `Engine.create` takes it for an image."""
    return f"{TEMPLATE_PREFIX}{name}" if tag == DEFAULT_TAG else f"{TEMPLATE_PREFIX}{name}:{tag}"


def _stems(root: Path) -> Iterable[str]:
    try:
        return [each.stem for each in root.iterdir() if each.suffix == ".json"]
    except FileNotFoundError:
        return []
