"""How people and programs use an engine: the command line (`cli`) and MCP (`mcp`). `http.py` is for surfaces over HTTP.

Each surface translates errors in one function, and makes no decision of its own.
"""
