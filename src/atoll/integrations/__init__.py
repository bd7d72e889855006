"""Atoll as the sandbox of frameworks, one module each. A module needs its framework, which its extra installs.

They stand above everything else of Atoll: each imports Atoll's public names and its framework, and none of the others.
`docs/integrations.md` says how each is used; `tests/foreign/` runs the suites that the frameworks publish.
"""
