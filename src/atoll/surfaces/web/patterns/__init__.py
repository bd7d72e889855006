"""The page of a pattern: its view, live, and its graph. `page.py` has the routes, `view_html.py` the first HTML."""

from __future__ import annotations

from atoll.surfaces.web.patterns.page import PatternPage, accepted_hosts, listen

__all__ = ["PatternPage", "accepted_hosts", "listen"]
