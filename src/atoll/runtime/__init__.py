"""Sandboxes with names, over drivers: the behaviour that every kind of isolation shares.

    engine.py         the public face: `open` and `Engine`
    provisioning.py   create, claim, fork, import
    connections.py    which sandboxes are open in this process, and how their guests are reached
    sandbox.py        the handle of one sandbox: commands, files, ports
    sandbox_pool.py   the sandboxes of one session
    guest/            the protocol: frames, streams, operations
    images/           from an image reference to read-only layers
    state/            what is on disk, and the locks on it
    lifecycle/        start, sleep, checkpoint, recover, warm pools
    archive/          a sandbox in one file
    egress/           connections out of a sandbox
    secrets/          values that stay outside
    previews/         ports of a sandbox as URLs
    http1.py          what the HTTP/1.1 proxies share

Not here: how isolation is made (`drivers/`), and who calls it (`tools/`, `agents/`, `surfaces/`).
"""
