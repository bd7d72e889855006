"""A server for tests, in a process of its own: what `--atoll-face remote` connects to.

So one suite tests both engines: the fixtures of `plugin.py` give an engine of `atoll.connect()`, whose server uses the
state directory of the test. Not here: the server itself (`surfaces/serve/`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

_ANY_POLICY = {
    "images": ["host", "*", "localhost/*", "127.0.0.1:*/*", "dir:/*", "oci:/*", "tar:/*"],
    "networks": ["*", "registries", "127.0.0.0/8"],
    "mounts": ["/tmp:rw"],
}


class ServerProcess:
    """A server on a state directory, with an administrator's key of a tenant that may do everything."""

    def __init__(self, state_dir: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("ATOLL_URL", "ATOLL_API_KEY")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "atoll.testing.serving", str(state_dir)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the server ended with status {self._process.returncode}")
        told = json.loads(line)
        self.url: str = told["url"]
        self.key: str = told["key"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Stop it. Its sandboxes go on."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _serve(state_dir: Path) -> None:
    import signal

    import anyio

    from atoll.server.server import Server
    from atoll.server.tenants import DEFAULT_TENANT, TenantPolicy
    from atoll.surfaces.serve.process import ReadyServer, serve
    from atoll.surfaces.serve.settings import ServerSettings

    settings = ServerSettings(state_dir=state_dir, listen="127.0.0.1:0")
    async with Server.open(settings) as server:
        await server.tenants.update(DEFAULT_TENANT, policy=TenantPolicy.model_validate(_ANY_POLICY))
        key = (await server.keys.create("test", tenant=None, role="admin"))[1].get_secret_value()

    told = os.dup(1)  # the log goes elsewhere: it is not read here, and a full pipe would stop the server
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)

    def ready(server: ReadyServer) -> None:
        os.write(told, json.dumps({"url": server.url, "key": key}).encode() + b"\n")
        os.close(told)

    async with anyio.create_task_group() as group:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:

            async def stop() -> None:
                async for _ in signals:
                    group.cancel_scope.cancel()

            group.start_soon(stop)
            await serve(settings, on_ready=ready)


if __name__ == "__main__":
    import anyio as _anyio

    _anyio.run(_serve, Path(sys.argv[1]))
