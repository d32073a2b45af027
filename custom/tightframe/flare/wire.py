"""Keys of our values in the engine's ``Shareable``; separate, so that light tasks import no torch."""

MESSAGE = "tightframe.message"
CODE = "tightframe.code"
