"""The Messages API with code execution, for clients that were written for hosted programmatic tool calling.

The code runs in sandboxes here, and any model of `agents/models.py` writes it. `app` is the ASGI app; `listen` serves
it.
"""

from atoll.surfaces.messages.http import app as app, listen as listen
