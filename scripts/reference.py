"""Writes `docs/reference.md`, the public API with all settings and defaults, and `docs/commands.md`, the command line.

    python scripts/reference.py            write them
    python scripts/reference.py --check    fail if they are not current

`make format` runs the first, `make check` the second. Everything comes from the code: names from `atoll.__all__`,
signatures and the first paragraph and `Raises:` of docstrings from the sources, variables from `Settings`, commands
from the grammar of the command line. Only the table `DEFAULTS` says here which numbers matter to users, and fails when
one is gone.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import atoll

ROOT = Path(__file__).resolve().parents[1]
os.environ["COLUMNS"] = "100"  # of help texts

GROUPS: dict[str, tuple[str, ...]] = {
    "Engine and sandboxes": ("atoll.runtime.", "atoll.client.", "atoll.settings"),
    "Values": ("atoll.contract.model", "atoll.contract.network", "atoll.contract.secret", "atoll.contract.driver"),
    "Tools": ("atoll.tools.",),
    "Code that calls tools": ("atoll.code.",),
    "Agents": ("atoll.agents.",),
    "Errors": ("atoll.contract.errors",),
}
"""The parts of the page, and the modules whose names each has."""
OTHERS = {
    "atoll.tools.export": ("definitions", "result", "image_message"),
    "atoll.reactive": (
        *("Graph", "cell", "computed", "handler", "batch", "exec", "fetch_data", "generate_text", "sandbox"),
        *("read_sandbox_file", "write_sandbox_file", "pattern", "Node", "NodeState", "NodeInfo", "Cell", "Computed"),
        *("Operation", "Handler", "CommandResult", "SandboxHandle", "Pattern", "RunningPattern"),
    ),
    "atoll.reactive.view": (
        *("text", "heading", "pre", "table", "image", "svg", "chart", "loader", "input", "select", "button"),
        *("row", "column"),
    ),
    "atoll.surfaces.mcp": ("app", "ServerConfig"),
}
"""Public names that are not in `atoll` itself."""
CONSTRUCTED = (
    *("atoll.tools.", "atoll.agents.", "atoll.code.", "atoll.contract.secret", "atoll.contract.network"),
    *("atoll.runtime.project.project", "atoll.reactive.graph", "atoll.surfaces."),
)
"""Where programs make the objects themselves, so that constructors are shown."""


INTERNAL = {
    "Engine": ("begin_recovery", "egress_servers", "leases", "wait_refilled"),
    "Graph": tuple(
        "admit at_end begin begin_reading closed connector dequeue dispose_node end_reading ended enqueue find flush "
        "forget handle in_background in_handler is_closing mark new_id note_read reader require_writable shared "
        "spread".split()
    ),
    "Node": tuple(
        "complete current disposed end fail graph height id link marked readers reads refresh refused trace track "
        "wait waiters".split()
    ),
    "Operation": ("release", "show_output", "start"),
    "Pattern": ("read_inputs",),
    "ProjectCopy": ("fill",),
    "SandboxPool": ("end",),
    "Sandbox": ("apply_policy", "disconnect", "epoll_waiters", "forget_failure", "is_served_here"),
}
"""What other modules of Atoll call, and programs have no use for."""


class Default(NamedTuple):
    what: str
    constant: str
    """`module:NAME`, where the code has it."""
    change: str
    """How a user sets another."""
    unit: str = ""


DEFAULTS = (
    Default("memory of a sandbox", "atoll.runtime.state.spec:_MEMORY_BYTES", "`Limits.memory_bytes`, `--memory`", "B"),
    Default("processes and threads of a sandbox", "atoll.runtime.state.spec:_PIDS", "`Limits.pids`, `--pids`"),
    Default("`/run` and `/dev/shm` inside, together", "atoll.drivers.bundle:SCRATCH_BYTES", "fixed", "B"),
    Default("user of commands", "atoll.runtime.provisioning:DEFAULT_USER", "`create(user=…)`, `--user`"),
    Default(
        "output of `exec` that is kept, of each stream",
        "atoll.runtime.guest.exec_request:OUTPUT_LIMIT_BYTES",
        "`output_limit_bytes`",
        "B",
    ),
    Default("one `files.read_bytes`, at most", "atoll.runtime.guest.files:MAX_READ_BYTES", "read in ranges", "B"),
    Default("one `files.download`, at most", "atoll.runtime.guest.copying:MAX_DOWNLOAD_BYTES", "`limit_bytes`", "B"),
    Default(
        "copy of a project, at most",
        "atoll.runtime.project.project:MAX_PROJECT_BYTES",
        "`limit_bytes`, `ATOLL_PROJECT_MIB`",
        "B",
    ),
    Default(
        "files and directories of a project, at most",
        "atoll.runtime.project.project:MAX_PROJECT_FILES",
        "`limit_files`, `ATOLL_PROJECT_FILES`",
    ),
    Default("warm sandboxes of one pool, at most", "atoll.runtime.lifecycle.warm_pool:MAX_WARM", "fixed"),
    Default(
        "a sandbox of a session sleeps when unused for",
        "atoll.runtime.sandbox_pool:SLEEP_AFTER_S",
        "`engine.pool(sleep_after_s=…)`",
        "s",
    ),
    Default("a guest that says nothing has failed after", "atoll.runtime.guest.connection:HANDSHAKE_S", "fixed", "s"),
    Default("DNS lookup of an outgoing connection", "atoll.runtime.egress.proxy:DNS_TIMEOUT_S", "fixed", "s"),
    Default("connecting to an allowed address", "atoll.runtime.egress.proxy:CONNECT_TIMEOUT_S", "fixed", "s"),
    Default("port of the egress proxy inside", "atoll.contract.inside:EGRESS_PORT", "fixed"),
    Default("audit log of a sandbox, two files of", "atoll.runtime.egress.audit:MAX_FILE_BYTES", "fixed", "B"),
    Default("a preview waits for the first byte", "atoll.runtime.previews.proxy:FIRST_BYTE_TIMEOUT_S", "fixed", "s"),
    Default("tool `shell`: time-out", "atoll.tools.pool:DEFAULT_TIMEOUT_MS", "its argument", "ms"),
    Default("tool `bash`: time-out", "atoll.tools.coding:DEFAULT_TIMEOUT_S", "its argument", "s"),
    Default("what a tool shows of an output or a file", "atoll.tools.view:MAX_SHOWN_BYTES", "fixed", "B"),
    Default("tool `save_file`: all files of a session", "atoll.tools.saving:MAX_SAVED_BYTES", "fixed", "B"),
    Default("vocabulary of `mcp` and `agent`", "atoll.tools.vocabularies:DEFAULT", "`--tools`"),
    Default("steps of an agent's run", "atoll.agents.loop:DEFAULT_STEPS", "`Agent(steps=…)`"),
    Default(
        "MCP over HTTP listens on",
        "atoll.surfaces.cli.commands.mcp:_McpCommand.default_address",
        "`mcp --http ADDRESS`",
    ),
    Default("MCP over HTTP: sessions at once", "atoll.surfaces.mcp.http:MAX_SESSIONS", "`app(sessions=…)`"),
    Default(
        "MCP over HTTP: an unused session ends after", "atoll.surfaces.mcp.http:DEFAULT_IDLE_S", "`mcp --idle`", "s"
    ),
    Default("MCP: one message, at most", "atoll.surfaces.mcp.stdio:MAX_MESSAGE_BYTES", "fixed", "B"),
)


def main() -> int:
    pages = {ROOT / "docs/reference.md": reference(), ROOT / "docs/commands.md": command_line()}
    stale = [page for page, text in pages.items() if not page.exists() or page.read_text() != text]
    if "--check" not in sys.argv[1:]:
        for page in stale:
            page.write_text(pages[page])
        return 0
    for page in stale:
        sys.stderr.write(f"{page.relative_to(ROOT)} is not current: run 'make format'\n")
    return 1 if stale else 0


# ---- docs/reference.md ----


def reference() -> str:
    modules = {home.rpartition(".")[2] for home in OTHERS if home.startswith("atoll.tools.")}  # `atoll.export`
    names = {name: getattr(atoll, name) for name in sorted(atoll.__all__) if name not in modules}
    homes: dict[str, str] = vars(atoll)["_HOME_OF"]
    parts = {title: [name for name in names if homes[name].startswith(under)] for title, under in GROUPS.items()}
    if missing := set(names) - {name for part in parts.values() for name in part}:
        raise SystemExit(f"no part of the page has these names: {', '.join(sorted(missing))}; see GROUPS")
    lines = [
        "# Reference",
        "",
        "<!-- Written by scripts/reference.py from the code; `make format` writes it again. -->",
        "",
        (
            "Every public name of `atoll`, every environment variable and every default. [guide.md](guide.md) shows "
            "them in use, [commands.md](commands.md) has the command line. What is not here is not public. An "
            "`AwaitableContext[X]` is awaited, which gives an `X`, or entered with `async with`, which also ends it."
        ),
        "",
        " · ".join(f"[{title}](#{_anchor(title)})" for title in ("Environment variables", "Defaults", *parts, MORE)),
        "",
        *_settings(),
        *_defaults(),
    ]
    for title, members in parts.items():
        lines += [f"## {title}", "", *(_errors(members, names) if title == "Errors" else _entries(members, names))]
    return "\n".join([*lines, *_other_modules()]).rstrip() + "\n"


MORE = "Other modules"


def _settings() -> Iterator[str]:
    yield from (
        "## Environment variables",
        "",
        (
            "Each is also a field of `Settings`, for `atoll.open(settings=…)`. Nothing else of Atoll is read from the "
            "environment but `PATH` (where the runtimes are), `TERM`, `NO_COLOR` and the variables of model "
            "providers ([agents.md](agents.md))."
        ),
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    )
    for field in _fields(atoll.Settings):
        default = "unset" if field.default in ("None", None) else f"`{field.default.strip(chr(39))}`"
        yield f"| `ATOLL_{field.name.upper()}` | {default} | {_cell(field.text)} |"
    yield ""


def _defaults() -> Iterator[str]:
    yield from (
        "## Defaults",
        "",
        (
            "A limit that has a default applies where the machine can enforce it (`atoll doctor`). `exec` and "
            "`spawn` have no time-out unless one is given."
        ),
        "",
        "| what | default | set with |",
        "|---|---|---|",
    )
    for each in DEFAULTS:
        module, _, path = each.constant.partition(":")
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
        yield f"| {each.what} | {_amount(value, each.unit)} | {each.change} |"
    yield ""


def _amount(value: Any, unit: str) -> str:
    if unit == "B":
        for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
            if value >= 1024**power and value % 1024**power == 0:
                return f"{value // 1024**power} {name}"
        return f"{value:,} bytes"
    if unit == "ms":
        value, unit = value / 1000, "s"
    if unit == "s":
        return f"{value / 60:g} min" if value >= 120 and value % 60 == 0 else f"{value:g} s"
    return f"`{value}`"


def _entries(members: Sequence[str], names: dict[str, Any]) -> Iterator[str]:
    for name in members:
        value = names[name]
        if inspect.isclass(value):
            yield from _class(name, value)
        elif inspect.isfunction(value):
            node = _parsed(value)
            yield from (f"### `{name}`", "", f"`{_signature(node, name)}`", "", *_described(inspect.getdoc(value)))
        else:
            yield from (f"### `{name}`", "", f"A type: `{_alias(value)}`", "")


def _class(name: str, kind: type) -> Iterator[str]:
    yield from (f"### `{name}`", "", *_described(_own_doc(kind)))
    members: dict[str, list[str]] = {}
    fields = {field.name: field for field in _fields(kind)}
    for each in _ours(kind):
        for node in _parsed(each).body:
            match node:
                case ast.FunctionDef(name="__init__"):
                    members |= _constructor(name, node, kind)
                case ast.FunctionDef() | ast.AsyncFunctionDef() if not node.name.startswith("_"):
                    members |= {node.name: [_method(node)]}
    for field in fields.values():
        default = f" = {field.default}" if field.default is not None else ""
        yield f"- `{field.name}: {field.annotation}{default}`{': ' if field.text else ''}{field.text}"
    internal = {member for each in _ours(kind) for member in INTERNAL.get(each.__name__, ())}
    for member, lines in members.items():
        if member not in internal:
            yield from lines
    if fields or members:
        yield ""


def _constructor(owner: str, node: ast.FunctionDef, kind: type) -> dict[str, list[str]]:
    """The constructor, if programs call it, and the public attributes that it sets: annotated, or given as an argument,
    or made by calling a class."""
    shown = {}
    if kind.__module__.startswith(CONSTRUCTED) and not _takes_fields(kind):
        shown[owner] = [f"- `{_signature(node, owner, returns=False)}`"]
    given = {each.arg: _annotation(each.annotation) for each in (*node.args.args, *node.args.kwonlyargs)}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        match statement:
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=written):
                annotation = _annotation(written)
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Name(id=argument)) if argument in given:
                annotation = given[argument]
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call(func=called)):
                annotation = _annotation(called).rpartition(".")[2]
                if not annotation[:1].isupper():
                    continue
            case _:
                continue
        if not name.startswith("_"):
            text = _text(following)
            shown[name] = [f"- `{name}: {annotation}`{': ' if text else ''}{text}"]
    return shown


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    if decorators & {"property", "cached_property"}:
        shown = f"{node.name}: {_annotation(node.returns)}"
    else:
        entered = "asynccontextmanager" in decorators
        shown = f"async with {_signature(node, node.name)}" if entered else _signature(node, node.name)
    text = " ".join(line for line in _described(ast.get_docstring(node)) if line)
    return f"- `{shown}`{': ' if text else ''}{text}"


def _takes_fields(kind: type) -> bool:
    """Whether the constructor takes the fields: then they are listed, and it is not."""
    return hasattr(kind, "__dataclass_fields__") or hasattr(kind, "field_names") or hasattr(kind, "model_fields")


class ShownField(NamedTuple):
    name: str
    annotation: str
    default: str | None
    text: str


def _fields(kind: type) -> Iterator[ShownField]:
    """The public annotated attributes of a class, its bases' first, with the text under each."""
    found: dict[str, ShownField] = {}
    for each in _ours(kind):
        body = _parsed(each).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                    if isinstance(node.annotation, ast.Subscript) and _annotation(node.annotation.value) == "ClassVar":
                        continue
                    found[name] = ShownField(name, _annotation(node.annotation), _default(node.value), _text(following))
    yield from found.values()


def _default(value: ast.expr | None) -> str | None:
    """The default of a field as the source has it, of `Field(…)` the one inside. None: it is required."""
    match value:
        case None:
            return None
        case ast.Call(func=ast.Name(id="Field" | "field"), keywords=keywords):
            given = {each.arg: each.value for each in keywords}
            if "default" in given:
                return ast.unparse(given["default"])
            factory = given.get("default_factory")
            return None if factory is None else f"{ast.unparse(factory)}()".removeprefix("lambda: ")
    return ast.unparse(value)


def _text(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return _prose(" ".join(inspect.cleandoc(text).split()))
    return ""


def _ours(kind: type) -> list[type]:
    """The classes of Atoll that a class is made of, the base first. Not the roots of models, which have no fields."""
    roots = ("atoll.contract.frozen", "atoll.contract.model.StrictModel")
    return [
        each
        for each in reversed(kind.__mro__)
        if each.__module__.startswith("atoll.") and not f"{each.__module__}.{each.__name__}".startswith(roots)
    ]


def _own_doc(kind: type) -> str | None:
    return inspect.cleandoc(kind.__dict__["__doc__"]) if kind.__dict__.get("__doc__") else None


def _errors(members: Sequence[str], names: dict[str, Any]) -> Iterator[str]:
    yield from (
        (
            "The tree of errors. `code` is stable; the builtin in parentheses is a second base. The guide has "
            "[the same as a table](guide.md#errors)."
        ),
        "",
        "```",
        *textwrap.dedent(str(importlib.import_module("atoll.contract.errors").__doc__))
        .partition("\n\n")[2]
        .partition("\n\n")[0]
        .splitlines(),
        "```",
        "",
        "| error | `code` | retryable |",
        "|---|---|---|",
    )
    for name in members:
        yield f"| `{name}` | `{names[name].code}` | {'yes' if names[name].retryable else 'no'} |"
    yield ""


def _paths() -> Iterator[tuple[str, str]]:
    for module, names in OTHERS.items():
        yield from ((f"{module}.{name}", module) for name in names)


def _other_modules() -> Iterator[str]:
    blocking = ast.parse((ROOT / "src/atoll/sync.pyi").read_text())
    classes = [node.name for node in blocking.body if isinstance(node, ast.ClassDef) and node.name != "Blocking"]
    yield from (f"## {MORE}", "")
    others = {path: getattr(importlib.import_module(module), path.rpartition(".")[2]) for path, module in _paths()}
    yield from _entries(list(others), others)
    yield from (
        "### `atoll.sync`",
        "",
        *_described(importlib.import_module("atoll.sync").__doc__),
        (
            f"Its classes have the methods of those above, and block: {', '.join(f'`{name}`' for name in classes)}. "
            "`async with` is `with`, `async for` is `for`, `aclose` is `close`."
        ),
        "",
        "### `atoll.testing`",
        "",
        *_described(importlib.import_module("atoll.testing").__doc__),
        "It is run with `pytest --pyargs atoll.testing.conformance -p atoll.testing.plugin --atoll-runtime NAME`.",
        "",
    )


# ---- docs/commands.md ----


def command_line() -> str:
    from atoll.surfaces.cli.app import App

    app = App()
    return (
        "\n".join(
            [
                "# The command line",
                "",
                "<!-- Written by scripts/reference.py from the code; `make format` writes it again. -->",
                "",
                "What `--help` of each command prints.",
                "",
                *_command("atoll", app, 2),
            ]
        ).rstrip()
        + "\n"
    )


def _command(path: str, command: Any, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} `{path}`", "", "```text", *map(str.rstrip, command.help(path).splitlines()), "```", "")
    if hasattr(command, "commands"):
        for name, each in command.commands().items():
            yield from _command(f"{path} {name}", each, min(level + 1, 4))


# ---- text ----


def _parsed(defined: Any) -> Any:
    """The syntax tree of a class or a function."""
    return ast.parse(textwrap.dedent(inspect.getsource(defined))).body[0]


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, *, returns: bool = True) -> str:
    result = _annotation(node.returns)
    iterates = result.startswith(("AsyncIterator", "AsyncGenerator"))
    prefix = "await " if isinstance(node, ast.AsyncFunctionDef) and not iterates else ""
    return f"{prefix}{name}({', '.join(_arguments(node.args))})" + (f" -> {result}" if returns and result else "")


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """As the formatter of the sources would write them, without `self`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first = len(positional) - len(arguments.defaults)
    for index, each in enumerate(positional):
        if each.arg not in ("self", "cls") or index:
            yield _argument(each, arguments.defaults[index - first] if index >= first else None)
    if arguments.vararg:
        yield f"*{_argument(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(each, default)
    if arguments.kwarg:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {_annotation(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{annotation}" + (f" = {ast.unparse(default)}" if default is not None else "")


def _annotation(node: ast.expr | None) -> str:
    match node:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            return _annotation(kind)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "" if node is None else ast.unparse(node).replace("builtins.", "")


def _alias(value: Any) -> str:
    """A type alias, without the modules of its parts."""
    if get_origin(value) is Annotated:
        value = get_args(value)[0]
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(value))


def _described(doc: str | None) -> list[str]:
    """The first paragraph of a docstring and what it raises, each followed by an empty line."""
    if not doc:
        return []
    first, _, rest = inspect.cleandoc(doc).partition("\n\n")
    text = " ".join(first.split())
    lines = [] if text.startswith("Raises:") else [_prose(text), ""]
    raised = re.search(r"^Raises:\n((?:[ ]+.*\n?)+)", f"{first}\n\n{rest}", flags=re.MULTILINE)
    if raised:
        lines += [f"*Raises* {_prose('; '.join(_raised(textwrap.dedent(raised[1]))))}", ""]
    return lines


def _raised(text: str) -> Iterable[str]:
    """Entries of the form `Name, Name: when`, each in one line."""
    entries: list[str] = []
    for line in text.splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    for entry in entries:
        classes, colon, when = entry.partition(":")
        if colon and re.fullmatch(r"[A-Z]\w+(?:, [A-Z]\w+)*", classes):
            classes = ", ".join(f"`{name}`" for name in classes.split(", "))
        yield f"{classes}{colon}{when.rstrip('.') if colon else ''}"


def _prose(text: str) -> str:
    """Text of a docstring as Markdown: what is not in backticks stays as it was written."""
    parts = text.split("`")
    parts[::2] = [part.replace("*", "\\*").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
