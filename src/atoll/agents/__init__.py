"""Agents: models that call tools. The agent loop, model providers, histories, scripted models and child agents."""

from importlib.util import find_spec as _find_spec

from atoll.contract.errors import install_extra as _install_extra

# Not by importing it: that takes most of a second, and not all that is here needs it.
if _find_spec("pydantic_ai") is None:
    raise ImportError(f"agents need packages that are not installed; {_install_extra('agents')}")
