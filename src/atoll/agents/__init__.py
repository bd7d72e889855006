"""Agents: models that call tools. The agent loop, model providers, histories, scripted models and child agents."""

from atoll.contract.errors import install_extra as _install_extra

try:
    import pydantic_ai as _pydantic_ai  # noqa: F401
except ImportError as _error:
    raise ImportError(f"agents need packages that are not installed; {_install_extra('agents')}") from _error
