"""The NVFlare binding: the only folder of the package that imports nvflare."""

MESSAGE = "tightframe.message"
"""The key of a message of ours in the engine's ``Shareable``."""

CODE = "tightframe.code"
"""The key of the code that a failed task answers with."""
