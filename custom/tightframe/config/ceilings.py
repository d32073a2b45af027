"""How large a job may be where nobody has said otherwise; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """Sizes beyond which a job's model is not built and its sums are not planned; None sets no limit.

    Attributes:
        parameters: numbers in a model, its buffers among them.
        message_bytes: of a silo's largest term.
    """

    parameters: int | None = 100_000_000
    message_bytes: int | None = 2**30
