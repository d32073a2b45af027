"""Names of what travels in an engine's ``Shareable``; apart, so that light tasks import no torch."""

MESSAGE = "tightframe.message"
CODE = "tightframe.code"
