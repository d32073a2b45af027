"""What a job's largest task moves over a silo's line, and what that leaves of ``site_timeout``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tightframe.results.words import megabytes

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig
    from tightframe.rounds.setup import JobSetup

LINE = 10.0
"""Mbit/s of the line that is calculated with."""
UNSEEN = 64 * 2**20
"""Bytes of an answer that the engine hands to the connection before it waits for any to arrive."""


def resend_after(job: JobConfig) -> int:
    """Seconds after which a silo sends again what was lost with its connection.

    The engine's own 300 s are longer than many a silo has for its whole task.
    """
    return max(5, job.site_timeout // 3)


@dataclass(frozen=True)
class Traffic:
    """What one task of a silo moves.

    Attributes:
        down: bytes of the model and what else a round begins with.
        up: bytes of the largest term.
        site_timeout: seconds that the silo has for the task.
        again: seconds after which it sends its answer again.
    """

    down: int
    up: int
    site_timeout: int
    again: int

    @classmethod
    def of(cls, setup: JobSetup) -> Traffic:
        """Of a job, from what it declares; evaluation with it, the protocol's own few kilobytes not."""
        from tightframe.rounds.checkpoint import tensor_bytes

        first = setup.training_phases(setup.job.rounds)[0]
        sizes = [
            sum(item.bytes for item in phase.schema.fields)
            for exchange in setup.plan
            for phase in exchange.phases
        ]
        return cls(
            down=len(tensor_bytes(first.broadcast(setup.initial_state()))),
            up=max(sizes),
            site_timeout=setup.job.site_timeout,
            again=resend_after(setup.job),
        )

    def seconds(self, line: float = LINE) -> float:
        """How long that takes on a line of so many Mbit/s, down and up one after the other."""
        return 8 * (self.down + self.up) / (line * 1e6)

    @property
    def slowest(self) -> float:
        """Mbit/s that a line needs.

        On a slower one more than half of the silo's time goes into it, or the silo takes its own answer for
        lost and sends it a second time.
        """
        resent = min(self.up, UNSEEN) / self.again
        return 8 * max(resent, 2 * (self.down + self.up) / self.site_timeout) / 1e6

    def __str__(self) -> str:
        """One line for people."""
        moves = f"a task moves up to {megabytes(self.down)} MB to a silo and {megabytes(self.up)} MB back"
        takes = f"{self.seconds():.1f} s of its {self.site_timeout} s on a line of {LINE:g} Mbit/s"
        text = f"{moves}: {takes}"
        if self.slowest > LINE / 2:
            text += f"; raise `site_timeout`, or see that no line is slower than {self.slowest:.1f} Mbit/s"
        return text
