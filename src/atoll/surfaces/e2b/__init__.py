"""The E2B surface of `atoll serve`: clients of the E2B SDKs, unmodified, over the same engine.

Owns the translation, and no state but what an SDK expects to be remembered between two requests. From the outside:
`routing.py` (which requests are E2B's, and which sandbox they are for), then one of two planes. The control plane has
API keys: `control.py` (a route, its checks and its errors), `sandboxes.py`, `snapshots.py`. A sandbox's own plane has
its token: `connect.py` (Connect RPC), `processes.py`, `filesystem.py`, `transfer.py` (/files). Shared: `tokens.py`
(ids, tokens, signatures), `record.py` (what E2B says of a sandbox and Atoll does not), `networks.py`. Not here: rules,
quotas and policy (`atoll.server`). `docs/e2b.md` lists every call. Used by `surfaces/serve/`.
"""
