"""`atoll serve`: the server as one process.

| module | owns |
|---|---|
| `app.py` | the app: which routes there are, and the order of what a request passes |
| `process.py` | the life of the process: one per state directory, start, signals, end |
| `settings.py` | what can be set, and where each value came from |
| `tls.py` | certificates: given or our own, read again when they change |
| `previews.py` | ports of sandboxes as URLs of the server |
| `tenant_apps.py` | /mcp and /v1/messages, for each tenant |
| `logs.py`, `metrics.py` | what the operator sees |
| `docs_page.py` | /docs |
| `unit.py` | the systemd unit |

Not here: routes below /api (`surfaces/rest/`), data and rules (`atoll.server`), the door (`surfaces/door/`). Used by
`atoll serve`.
"""
