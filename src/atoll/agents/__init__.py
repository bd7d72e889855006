"""Models that use tools: which there are, the loop that drives them, what they said, and their children."""

try:
    import pydantic_ai as _pydantic_ai  # noqa: F401
except ImportError as _error:
    raise ImportError("agents need packages that are not installed: pip install 'atoll[agents]'") from _error
