"""Limits on the size of a job, with the defaults where no policy sets them; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """The largest sizes with which a job's model is built and its sums are planned; None sets no limit.

    Attributes:
        parameters: numbers in a model, including its buffers.
        message_bytes: bytes of a silo's largest term.
    """

    parameters: int | None = 100_000_000
    message_bytes: int | None = 2**30
