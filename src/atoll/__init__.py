"""Atoll gives every AI agent its own Linux machine, on your own hardware.

    async with atoll.open() as engine:
        box = await engine.create("demo")
        result = await box.exec("echo hello from $(hostname)")

The names below are the public API. Each is loaded when it is first used, so that `import atoll` takes almost no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.agents.children import (
        Children as Children,
        Role as Role,
    )
    from atoll.agents.events import (
        AgentEvent as AgentEvent,
        RetryEvent as RetryEvent,
        TextEvent as TextEvent,
        ThinkingEvent as ThinkingEvent,
        Tokens as Tokens,
        ToolCallEvent as ToolCallEvent,
        ToolResultEvent as ToolResultEvent,
        UsageEvent as UsageEvent,
    )
    from atoll.agents.history import History as History
    from atoll.agents.loop import (
        Agent as Agent,
        AgentStream as AgentStream,
        Answer as Answer,
        Budget as Budget,
        generate_text as generate_text,
    )
    from atoll.agents.orchestrator import ProgrammaticToolOrchestrator as ProgrammaticToolOrchestrator
    from atoll.client.engine import connect as connect
    from atoll.code.approvals import (
        Approval as Approval,
        ApprovalDecision as ApprovalDecision,
        ApprovalRequest as ApprovalRequest,
        Approver as Approver,
        AskingApprover as AskingApprover,
        StoredApprovals as StoredApprovals,
    )
    from atoll.code.audit import (
        AuditEntry as AuditEntry,
        CodeAudit as CodeAudit,
    )
    from atoll.code.executor import CodeConfig as CodeConfig, CodeExecutor as CodeExecutor
    from atoll.code.registry import (
        RegisteredTool as RegisteredTool,
        ToolCallerType as ToolCallerType,
        ToolRegistry as ToolRegistry,
    )
    from atoll.code.results import (
        CallRecord as CallRecord,
        ExecutionFailure as ExecutionFailure,
        ExecutionResult as ExecutionResult,
        OutboxFile as OutboxFile,
        RichPart as RichPart,
    )
    from atoll.code.tool import code_tool as code_tool
    from atoll.contract.driver import (
        Capabilities as Capabilities,
        Diagnostic as Diagnostic,
    )
    from atoll.contract.errors import (
        ApprovalNotFound as ApprovalNotFound,
        ArchiveRefused as ArchiveRefused,
        AtollError as AtollError,
        BudgetExceeded as BudgetExceeded,
        BuildFailed as BuildFailed,
        BuildNotFound as BuildNotFound,
        BundleFailed as BundleFailed,
        BundleNotFound as BundleNotFound,
        CallerError as CallerError,
        CheckpointExists as CheckpointExists,
        CheckpointNotFound as CheckpointNotFound,
        CodeSessionBusy as CodeSessionBusy,
        CodeSessionNotFound as CodeSessionNotFound,
        ConfigNotFound as ConfigNotFound,
        Conflict as Conflict,
        ConversationNotFound as ConversationNotFound,
        DatabaseUnavailable as DatabaseUnavailable,
        DiskFull as DiskFull,
        ExecTimeout as ExecTimeout,
        FetchFailed as FetchFailed,
        FileError as FileError,
        Forbidden as Forbidden,
        GuestProtocolError as GuestProtocolError,
        GuestUnresponsive as GuestUnresponsive,
        IdempotencyMismatch as IdempotencyMismatch,
        ImageNotFound as ImageNotFound,
        ImageUnavailable as ImageUnavailable,
        InvalidRequest as InvalidRequest,
        KeyNotFound as KeyNotFound,
        LaunchFailed as LaunchFailed,
        ModelFailed as ModelFailed,
        ModelUnavailable as ModelUnavailable,
        NotCheckpointable as NotCheckpointable,
        OutcomeUnknown as OutcomeUnknown,
        PathExists as PathExists,
        PathIsDirectory as PathIsDirectory,
        PathNotDirectory as PathNotDirectory,
        PathNotFound as PathNotFound,
        PermissionDenied as PermissionDenied,
        PortRefused as PortRefused,
        ProcessNotFound as ProcessNotFound,
        ProjectConflict as ProjectConflict,
        QuotaExceeded as QuotaExceeded,
        RateLimited as RateLimited,
        RuntimeUnavailable as RuntimeUnavailable,
        SandboxDied as SandboxDied,
        SandboxError as SandboxError,
        SandboxExists as SandboxExists,
        SandboxNotFound as SandboxNotFound,
        SandboxShutdown as SandboxShutdown,
        ScriptFailed as ScriptFailed,
        ServerUnavailable as ServerUnavailable,
        TemplateNotFound as TemplateNotFound,
        TenantExists as TenantExists,
        TenantNotFound as TenantNotFound,
        ToolCallError as ToolCallError,
        TooManyProcesses as TooManyProcesses,
        Unauthenticated as Unauthenticated,
        Unenforceable as Unenforceable,
        UserNotFound as UserNotFound,
        VolumeExists as VolumeExists,
        VolumeNotFound as VolumeNotFound,
        WebhookNotFound as WebhookNotFound,
    )
    from atoll.contract.model import (
        Checkpoint as Checkpoint,
        ExecBytes as ExecBytes,
        ExecResult as ExecResult,
        Exited as Exited,
        ExportResult as ExportResult,
        FileChange as FileChange,
        FileEntry as FileEntry,
        FileStat as FileStat,
        Gap as Gap,
        GcResult as GcResult,
        Limits as Limits,
        Match as Match,
        Mount as Mount,
        Output as Output,
        Preview as Preview,
        ProcessEvent as ProcessEvent,
        ProcessInfo as ProcessInfo,
        SandboxInfo as SandboxInfo,
        StorageInfo as StorageInfo,
        SystemProcess as SystemProcess,
        Template as Template,
        TemplateVersion as TemplateVersion,
        Truncation as Truncation,
        Usage as Usage,
        Volume as Volume,
        WarmPool as WarmPool,
    )
    from atoll.contract.network import (
        AuditRecord as AuditRecord,
        NetworkPolicy as NetworkPolicy,
    )
    from atoll.contract.secret import Secret as Secret
    from atoll.runtime.engine import open as open
    from atoll.runtime.guest.files import Files as Files
    from atoll.runtime.guest.ports import (
        Listener as Listener,
        PortConnection as PortConnection,
    )
    from atoll.runtime.guest.process import (
        Process as Process,
        ProcessInput as ProcessInput,
    )
    from atoll.runtime.images.store import (
        ImageInfo as ImageInfo,
        ImageStore as ImageStore,
    )
    from atoll.runtime.interface import (
        CreateOptions as CreateOptions,
        Engine as Engine,
        Images as Images,
        PoolOptions as PoolOptions,
        Templates as Templates,
        Volumes as Volumes,
    )
    from atoll.runtime.project.changes import (
        ProjectChange as ProjectChange,
        ProjectChanges as ProjectChanges,
        RefusedChange as RefusedChange,
    )
    from atoll.runtime.project.project import (
        Project as Project,
        ProjectCopy as ProjectCopy,
    )
    from atoll.runtime.sandbox import Sandbox as Sandbox
    from atoll.runtime.sandbox_pool import (
        PoolDescription as PoolDescription,
        PooledSandbox as PooledSandbox,
        SandboxPool as SandboxPool,
    )
    from atoll.runtime.state.templates import TemplateStore as TemplateStore
    from atoll.runtime.state.volumes import VolumeStore as VolumeStore
    from atoll.settings import Settings as Settings
    from atoll.tools import export as export
    from atoll.tools.coding import coding_tools as coding_tools
    from atoll.tools.sprites import sprite_tools as sprite_tools
    from atoll.tools.tasks import (
        TaskEvent as TaskEvent,
        Tasks as Tasks,
    )
    from atoll.tools.tool import (
        Input as Input,
        Result as Result,
        Tool as Tool,
        ToolResult as ToolResult,
        ToolSet as ToolSet,
    )
    from atoll.tools.workspace import workspace_tools as workspace_tools

__version__ = "0.1.0"

# The imports above once more, for the interpreter. `tests/runtime/test_names.py` compares the two.
_HOMES = {
    "atoll.agents.children": "Children Role",
    "atoll.agents.events": """
        AgentEvent RetryEvent TextEvent ThinkingEvent Tokens ToolCallEvent ToolResultEvent UsageEvent
    """,
    "atoll.agents.history": "History",
    "atoll.agents.loop": "Agent AgentStream Answer Budget generate_text",
    "atoll.agents.orchestrator": "ProgrammaticToolOrchestrator",
    "atoll.code.approvals": "Approval ApprovalDecision ApprovalRequest Approver AskingApprover StoredApprovals",
    "atoll.code.audit": "AuditEntry CodeAudit",
    "atoll.code.executor": "CodeConfig CodeExecutor",
    "atoll.code.results": "CallRecord ExecutionFailure ExecutionResult OutboxFile RichPart",
    "atoll.code.registry": "RegisteredTool ToolCallerType ToolRegistry",
    "atoll.code.tool": "code_tool",
    "atoll.contract.driver": "Capabilities Diagnostic",
    "atoll.contract.errors": """
        ApprovalNotFound ArchiveRefused AtollError BudgetExceeded BuildFailed BundleFailed BundleNotFound CallerError
        CheckpointExists CheckpointNotFound CodeSessionBusy CodeSessionNotFound ConfigNotFound Conflict
        ConversationNotFound DatabaseUnavailable DiskFull ExecTimeout FetchFailed FileError Forbidden
        GuestProtocolError GuestUnresponsive IdempotencyMismatch ImageNotFound ImageUnavailable InvalidRequest
        KeyNotFound LaunchFailed ModelFailed ModelUnavailable NotCheckpointable OutcomeUnknown PathExists
        PathIsDirectory PathNotDirectory PathNotFound PermissionDenied PortRefused ProcessNotFound
        ProjectConflict QuotaExceeded RateLimited RuntimeUnavailable SandboxDied SandboxError SandboxExists
        SandboxNotFound SandboxShutdown ScriptFailed ServerUnavailable TemplateNotFound TenantExists TenantNotFound
        TooManyProcesses ToolCallError BuildNotFound
        Unauthenticated Unenforceable UserNotFound VolumeExists VolumeNotFound WebhookNotFound
    """,
    "atoll.contract.model": """
        Checkpoint ExecBytes ExecResult Exited ExportResult FileChange FileEntry FileStat Gap GcResult Limits
        Match Mount Output Preview ProcessEvent ProcessInfo SandboxInfo StorageInfo SystemProcess Template
        TemplateVersion Truncation Usage Volume WarmPool
    """,
    "atoll.contract.network": "AuditRecord NetworkPolicy",
    "atoll.contract.secret": "Secret",
    "atoll.client.engine": "connect",
    "atoll.runtime.engine": "open",
    "atoll.runtime.interface": "CreateOptions Engine Images PoolOptions Templates Volumes",
    "atoll.runtime.guest.files": "Files",
    "atoll.runtime.guest.ports": "Listener PortConnection",
    "atoll.runtime.guest.process": "Process ProcessInput",
    "atoll.runtime.images.store": "ImageInfo ImageStore",
    "atoll.runtime.project.changes": "ProjectChange ProjectChanges RefusedChange",
    "atoll.runtime.project.project": "Project ProjectCopy",
    "atoll.runtime.sandbox": "Sandbox",
    "atoll.runtime.sandbox_pool": "PoolDescription PooledSandbox SandboxPool",
    "atoll.runtime.state.templates": "TemplateStore",
    "atoll.runtime.state.volumes": "VolumeStore",
    "atoll.settings": "Settings",
    "atoll.tools": "export",
    "atoll.tools.coding": "coding_tools",
    "atoll.tools.sprites": "sprite_tools",
    "atoll.tools.tasks": "TaskEvent Tasks",
    "atoll.tools.tool": "Input Result Tool ToolResult ToolSet",
    "atoll.tools.workspace": "workspace_tools",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    home = importlib.import_module(_HOME_OF[name])
    value: object = getattr(home, name, None) or importlib.import_module(f"{_HOME_OF[name]}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
