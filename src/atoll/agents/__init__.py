"""Agents: models that call tools. The agent loop, model providers, histories, scripted models and child agents."""

try:
    import pydantic_ai as _pydantic_ai  # noqa: F401
except ImportError as _error:
    raise ImportError("agents need packages that are not installed: pip install 'atoll[agents]'") from _error
