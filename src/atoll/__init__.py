"""Atoll gives every AI agent its own Linux machine, on your own hardware.

    async with atoll.open() as runtime:
        box = await runtime.create("demo")
        result = await box.exec("echo hello from $(hostname)")

The names below are the public API. They are loaded when first used, so that `import atoll` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.agents.children import Children, Role
    from atoll.agents.history import History
    from atoll.agents.loop import Agent, Answer, Budget, Tokens, generate_text
    from atoll.contract.driver import Capabilities, Finding
    from atoll.contract.errors import (
        ArchiveRefused,
        AtollError,
        BudgetSpent,
        CallerError,
        CannotSave,
        CheckpointNotFound,
        DiskFull,
        ExecTimeout,
        FileError,
        GuestProtocolError,
        ImageUnavailable,
        InvalidRequest,
        LaunchFailed,
        ModelFailed,
        ModelUnavailable,
        PathDenied,
        PathExists,
        PathIsDirectory,
        PathNotDirectory,
        PathNotFound,
        PortRefused,
        ProcessNotFound,
        RuntimeUnavailable,
        SandboxAsleep,
        SandboxDied,
        SandboxError,
        SandboxExists,
        SandboxNotFound,
        ScriptFailed,
        Unenforceable,
    )
    from atoll.contract.model import (
        Checkpoint,
        Cut,
        Event,
        ExecBytes,
        ExecResult,
        Exited,
        Exported,
        FileChange,
        FileEntry,
        FileStat,
        Gap,
        Limits,
        Match,
        Output,
        Preview,
        ProcessInfo,
        SandboxInfo,
        Shelf,
        StorageInfo,
        SystemProcess,
        Usage,
    )
    from atoll.contract.network import AuditRecord, NetworkPolicy
    from atoll.contract.secret import Secret
    from atoll.runtime.engine import Runtime, open  # noqa: A004
    from atoll.runtime.guest.files import Files
    from atoll.runtime.guest.process import Process
    from atoll.runtime.images.store import ImageStore
    from atoll.runtime.sandbox import Sandbox
    from atoll.settings import Settings
    from atoll.tools.tool import Tool, ToolResult, ToolSet

__version__ = "0.1.0"

_ERRORS = """
ArchiveRefused AtollError BudgetSpent CallerError CannotSave CheckpointNotFound DiskFull ExecTimeout FileError
GuestProtocolError ImageUnavailable InvalidRequest LaunchFailed ModelFailed ModelUnavailable PathDenied PathExists
PathIsDirectory PathNotDirectory PathNotFound PortRefused ProcessNotFound RuntimeUnavailable SandboxAsleep SandboxDied
SandboxError SandboxExists SandboxNotFound ScriptFailed Unenforceable
"""
_MODELS = """
Checkpoint Cut Event ExecBytes ExecResult Exited Exported FileChange FileEntry FileStat Gap Limits Match Output
Preview ProcessInfo SandboxInfo Shelf StorageInfo SystemProcess Usage
"""
_HOMES = {
    "atoll.agents.children": "Children Role",
    "atoll.agents.history": "History",
    "atoll.agents.loop": "Agent Answer Budget Tokens generate_text",
    "atoll.contract.driver": "Capabilities Finding",
    "atoll.contract.errors": _ERRORS,
    "atoll.contract.model": _MODELS,
    "atoll.contract.network": "AuditRecord NetworkPolicy",
    "atoll.contract.secret": "Secret",
    "atoll.runtime.guest.files": "Files",
    "atoll.runtime.engine": "Runtime open",
    "atoll.runtime.images.store": "ImageStore",
    "atoll.runtime.guest.process": "Process",
    "atoll.runtime.sandbox": "Sandbox",
    "atoll.settings": "Settings",
    "atoll.tools.tool": "Tool ToolResult ToolSet",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Agent",
    "Answer",
    "ArchiveRefused",
    "AtollError",
    "AuditRecord",
    "Budget",
    "BudgetSpent",
    "CallerError",
    "CannotSave",
    "Capabilities",
    "Checkpoint",
    "CheckpointNotFound",
    "Children",
    "Cut",
    "DiskFull",
    "Event",
    "ExecBytes",
    "ExecResult",
    "ExecTimeout",
    "Exited",
    "Exported",
    "FileChange",
    "FileEntry",
    "FileError",
    "FileStat",
    "Files",
    "Finding",
    "Gap",
    "GuestProtocolError",
    "History",
    "ImageStore",
    "ImageUnavailable",
    "InvalidRequest",
    "LaunchFailed",
    "Limits",
    "Match",
    "ModelFailed",
    "ModelUnavailable",
    "NetworkPolicy",
    "Output",
    "PathDenied",
    "PathExists",
    "PathIsDirectory",
    "PathNotDirectory",
    "PathNotFound",
    "PortRefused",
    "Preview",
    "Process",
    "ProcessInfo",
    "ProcessNotFound",
    "Role",
    "Runtime",
    "RuntimeUnavailable",
    "Sandbox",
    "SandboxAsleep",
    "SandboxDied",
    "SandboxError",
    "SandboxExists",
    "SandboxInfo",
    "SandboxNotFound",
    "ScriptFailed",
    "Secret",
    "Settings",
    "Shelf",
    "StorageInfo",
    "SystemProcess",
    "Tokens",
    "Tool",
    "ToolResult",
    "ToolSet",
    "Unenforceable",
    "Usage",
    "generate_text",
    "open",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
