"""Reactive built-ins: values that change, and commands that run again when they do.

    async with atoll.open() as engine, reactive.Graph(engine):
        name = reactive.cell("world")
        run = reactive.exec(reactive.computed(lambda: f"echo hello {name.get()}"))
        print((await run).stdout)
        name.set("sea")
        print((await run).stdout)

Owns nothing but the public names. Used by programs and by `surfaces/`.
"""

from atoll.contract.errors import FetchFailed
from atoll.reactive import view
from atoll.reactive.builtins import CommandResult, exec, fetch_data, generate_text  # noqa: A004 - as all call it
from atoll.reactive.graph import Graph, batch, cell, computed, handler
from atoll.reactive.nodes import Cell, Computed, Node, NodeInfo, NodeState
from atoll.reactive.operations import Handler, Operation
from atoll.reactive.patterns import NAME, UI, Pattern, RunningPattern, pattern
from atoll.reactive.sandboxes import SandboxHandle, read_sandbox_file, sandbox, write_sandbox_file

__all__ = [
    "NAME",
    "UI",
    "Cell",
    "CommandResult",
    "Computed",
    "FetchFailed",
    "Graph",
    "Handler",
    "Node",
    "NodeInfo",
    "NodeState",
    "Operation",
    "Pattern",
    "RunningPattern",
    "SandboxHandle",
    "batch",
    "cell",
    "computed",
    "exec",
    "fetch_data",
    "generate_text",
    "handler",
    "pattern",
    "read_sandbox_file",
    "sandbox",
    "view",
    "write_sandbox_file",
]
