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

_ANY_POLICY = {"images": ["host", "*", "dir:/*", "oci:/*", "tar:/*"], "networks": ["*", "registries"], "mounts": ["/tmp:rw"]}


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
    import uvicorn
    from fastapi import FastAPI

    from atoll.server.server import Server
    from atoll.server.tenants import DEFAULT_TENANT, TenantPolicy
    from atoll.settings import Settings
    from atoll.surfaces import rest

    async with Server.open(Settings(state_dir=state_dir)) as server, anyio.create_task_group() as tasks:
        await server.tenants.update(DEFAULT_TENANT, policy=TenantPolicy.model_validate(_ANY_POLICY))
        key = server.first_key or (await server.keys.create("test", tenant=None, role="admin"))[1]
        app = FastAPI()
        rest.install(app, server)
        if hasattr(server, "run"):
            tasks.start_soon(server.run)
        config = uvicorn.Config(
            app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1, ws_per_message_deflate=False
        )
        listening = uvicorn.Server(config)

        async def announce() -> None:
            while not listening.started:
                await anyio.sleep(0.005)
            port = listening.servers[0].sockets[0].getsockname()[1]
            print(json.dumps({"url": f"http://127.0.0.1:{port}", "key": key.get_secret_value()}), flush=True)

        tasks.start_soon(announce)
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:

            async def stop() -> None:
                async for _ in signals:
                    listening.should_exit = True

            tasks.start_soon(stop)
            listening.config.load()
            await listening._serve()
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    import anyio as _anyio

    _anyio.run(_serve, Path(sys.argv[1]))
