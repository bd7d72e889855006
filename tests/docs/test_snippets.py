"""The documentation runs: README's program as a program, the snippets of a page's section one after another."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any
from urllib.parse import urlencode

import pytest

import atoll

ROOT = Path(__file__).parents[2]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def sections(page: str) -> dict[str, list[str]]:
    parts = re.split(r"^## (.*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {title: re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) for title, text in texts.items()}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory, give_host_image: Callable[[Path], Path]) -> Path:
    return give_host_image(tmp_path_factory.mktemp("state"))


NOTEBOOK_CELL = "import asyncio, sys\nasync def cell():\n    exec(sys.stdin.read())\nasyncio.run(cell())"
"""Runs a program as a notebook does: in a thread whose event loop runs."""


@pytest.mark.parametrize("how", ["script", "notebook"])
def test_the_readme_shows_it_in_fifteen_lines_that_run(state: Path, how: str) -> None:
    (program,) = python_blocks("README.md")
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    done = subprocess.run(
        [sys.executable, "-c", program if how == "script" else NOTEBOOK_CELL],
        input=program,
        env={**os.environ, "ATOLL_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "hello from demo\n 3\n" in done.stdout
    assert "begun\n" in done.stdout
    assert os.listdir(state / "sandboxes") == []


@pytest.mark.parametrize(
    ("page", "section"),
    [
        (page, section)
        for page in ("docs/guide.md", "docs/agents.md", "docs/code.md", "docs/reactive.md")
        for section, snippets in sections(page).items()
        if snippets
    ],
)
async def test_the_documentation_is_true(
    page: str,
    section: str,
    state: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if section == "A server's sandboxes":
        server = request.getfixturevalue("servers")(state)
        monkeypatch.setenv("ATOLL_URL", server.url)
        monkeypatch.setenv("ATOLL_API_KEY", server.key)
    here = tmp_path / "here"
    here.mkdir()
    (here / "file").write_text("x")
    for text, name in re.findall(r"```toml\n(# (\S+)\n.*?)```", (ROOT / page).read_text(), flags=re.DOTALL):
        (here / name).write_text(text)
    async with atoll.open(state) as engine, await engine.create("guide") as box:
        names: dict[str, object] = {"atoll": atoll, "engine": engine, "box": box, "here": here}
        for snippet in sections(page)[section]:
            code = compile(snippet, f"{page}, {section}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            assert isinstance(code, CodeType)
            coroutine = eval(code, names)
            if inspect.iscoroutine(coroutine):
                await coroutine


async def test_the_web_application_of_the_guide_serves_and_leaves_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(state))
    names: dict[str, Any] = {}
    (snippet,) = sections("docs/guide.md")["In a web application"]
    exec(snippet, names)
    app, sent = names["app"], []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def posted(code: str) -> tuple[int, dict[str, Any]]:
        sent.clear()
        query = urlencode({"code": code}).encode()
        scope = {"type": "http", "method": "POST", "path": "/run", "query_string": query, "headers": []}
        await app(scope, receive, send)
        return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))

    async with app.router.lifespan_context(app):
        status, answer = await posted("import sys; print(6 * 7); sys.exit(3)")
        assert (status, answer["stdout"], answer["exit_code"]) == (200, "42\n", 3)
        status, answer = await posted("\0")
        assert (status, answer["code"]) == (400, "invalid_request")
    assert os.listdir(state / "sandboxes") == []


def test_the_documentation_holds_under_strict_type_checks(tmp_path: Path) -> None:
    """A snippet that is copied into a program passes `mypy --strict` there."""
    (program,) = python_blocks("README.md")
    parts = [program, "import atoll\nfrom pathlib import Path"]
    for page in ("docs/guide.md", "docs/agents.md", "docs/reactive.md"):
        for number, snippet in enumerate(python_blocks(page)):
            given = "engine: atoll.Engine, box: atoll.Sandbox, here: Path"
            head = f"async def {Path(page).stem}_{number}({given}) -> None:"
            parts.append(f"{head}\n{textwrap.indent(snippet, '    ')}")
    file = tmp_path / "snippets.py"
    file.write_text("\n\n".join(parts))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", file],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_are_exactly_these() -> None:
    """The public API is pinned: adding or removing a name is a decision, with a line in the changelog."""
    names = """
    Agent AgentEvent AgentStream Answer Approval ApprovalDecision ApprovalNotFound ApprovalRequest Approver
    ArchiveRefused AskingApprover AtollError AuditEntry AuditRecord Budget BudgetExceeded BuildFailed BundleFailed
    BundleNotFound CallRecord CallerError Capabilities Checkpoint CheckpointExists CheckpointNotFound Children
    CodeAudit CodeConfig CodeExecutor CodeSessionBusy CodeSessionNotFound ConfigNotFound Conflict
    ConversationNotFound CreateOptions DatabaseUnavailable Diagnostic DiskFull Engine ExecBytes ExecResult
    ExecTimeout ExecutionFailure ExecutionResult Exited ExportResult FetchFailed FileChange FileEntry FileError
    FileStat Files Forbidden Gap GcResult GuestProtocolError GuestUnresponsive History IdempotencyMismatch ImageInfo
    ImageNotFound ImageStore ImageUnavailable Images Input InvalidRequest KeyNotFound LaunchFailed Limits Listener
    Match ModelFailed ModelUnavailable Mount NetworkPolicy NotCheckpointable OutboxFile OutcomeUnknown Output
    PathExists PathIsDirectory PathNotDirectory PathNotFound PermissionDenied PoolDescription PoolOptions
    PooledSandbox PortConnection PortRefused Preview Process ProcessEvent ProcessInfo ProcessInput ProcessNotFound
    ProgrammaticToolOrchestrator Project ProjectChange ProjectChanges ProjectConflict ProjectCopy QuotaExceeded
    RateLimited RefusedChange RegisteredTool Result RetryEvent RichPart Role RuntimeUnavailable Sandbox SandboxDied
    SandboxError SandboxExists SandboxInfo SandboxNotFound SandboxPool SandboxShutdown ScriptFailed Secret
    ServerUnavailable Settings StorageInfo StoredApprovals SystemProcess TaskEvent Tasks Template TemplateNotFound
    TemplateStore TemplateVersion Templates TenantExists TenantNotFound BuildNotFound
    TextEvent ThinkingEvent Tokens TooManyProcesses Tool ToolCallError ToolCallEvent ToolCallerType ToolRegistry
    ToolResult ToolResultEvent ToolSet Truncation Unauthenticated Unenforceable Usage UsageEvent UserNotFound Volume
    VolumeExists VolumeNotFound VolumeStore Volumes WarmPool WebhookNotFound code_tool coding_tools connect export
    generate_text open sprite_tools workspace_tools
""".split()
    assert sorted(atoll.__all__) == sorted(names)
    for name in names:
        assert getattr(atoll, name) is not None


def test_the_guides_table_of_errors_has_them_all() -> None:
    errors = {name for name in atoll.__all__ if name[0].isupper() and issubclass_of(name, atoll.AtollError)}
    groups = {"AtollError", "CallerError", "SandboxError", "FileError"}
    rows = (ROOT / "docs/guide.md").read_text().partition("## Errors")[2].partition("```")[0]
    assert set(re.findall(r"`(\w+)`", re.sub(r"\|[^|]*\|[^|]*\|$", "", rows, flags=re.MULTILINE))) >= errors - groups


def issubclass_of(name: str, base: type) -> bool:
    value = getattr(atoll, name)
    return isinstance(value, type) and issubclass(value, base)


def test_links_between_the_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
