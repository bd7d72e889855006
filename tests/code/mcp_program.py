"""A server with tools for tests, on standard streams."""

from __future__ import annotations

import os
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("things")


class User(BaseModel):
    name: str
    age: int | None = None


@server.tool(name="get-user", description="Find a user.")
def get_user(name: str, age: int = 3) -> User:
    if name == "nobody there":
        raise ToolError("no such user")
    return User(name=name, age=age)


@server.tool(structured_output=False)
def say(text: str) -> str:
    """Say a text."""
    return text


@server.tool(name="import", structured_output=False)
def import_(n: int = 1) -> list[Any]:
    """Text and an image."""
    return [f"first {n}", Image(data=b"x", format="png"), "second"]


@server.tool(structured_output=False)
def environment(name: str) -> str:
    """A variable of the server."""
    return os.environ.get(name, "")


@server.tool(structured_output=False)
def end() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
