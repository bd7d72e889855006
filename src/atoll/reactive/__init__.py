"""Reactive built-ins: values that change, and commands that run again when they do.

    async with atoll.open() as engine, reactive.Graph(engine):
        name = reactive.cell("world")
        run = reactive.exec(reactive.computed(lambda: f"echo hello {name.get()}"))
        print((await run).stdout)
        name.set("sea")
        print((await run).stdout)

Owns nothing but the public names. Used by programs and by `surfaces/`.
"""

from atoll.reactive.graph import Graph, batch, cell, computed, handler
from atoll.reactive.nodes import Cell, Computed, Node, NodeInfo, NodeState
from atoll.reactive.operations import Handler, Operation

__all__ = [
    "Cell",
    "Computed",
    "Graph",
    "Handler",
    "Node",
    "NodeInfo",
    "NodeState",
    "Operation",
    "batch",
    "cell",
    "computed",
    "handler",
]
