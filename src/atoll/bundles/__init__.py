"""Tool bundles: tools that a tenant uploads as an archive, and the sandbox that they run in.

`manifest.py` says what a bundle declares, `archive.py` reads an uploaded archive without trusting any of it,
`schemas.py` finds what a model is told about a tool, `workspace.py` has the sandbox. Not here: where archives are kept,
and who may use them (`server/bundles.py`).
"""
