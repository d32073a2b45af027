"""A silo's notes of what it verified: one file of words, which the jobs of a chain continue.

A word is a state (SHA-256, hex) whose totals are verified, or has one of the forms below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tightframe.files import append_durably
from tightframe.securesum.messages import SumId, Told, Total

VERIFIED = "verified"
"""File of these notes, in a silo's state."""
RESUMED = "resumed"
"""Word after the notes of each job that this one continues."""
WITHDRAWS = "withdraws"
"""Word before ``RESUMED``, after the run from which a withdrawal begins."""


@dataclass(frozen=True)
class Notes:
    """A silo's notes, word for word, of this job and those that it continues."""

    words: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Notes:
        """Read the notes in a silo's state folder; none if there are none."""
        path = folder / VERIFIED
        return cls(tuple(path.read_text().split())) if path.is_file() else cls()

    @cached_property
    def jobs(self) -> tuple[Notes, ...]:
        """The notes of each job of the chain; this job's are the last."""
        ends = [place for place, word in enumerate(self.words) if word == RESUMED]
        starts = [0, *(end + 1 for end in ends)]
        return tuple(Notes(self.words[start:end]) for start, end in zip(starts, [*ends, None], strict=True))

    @property
    def mine(self) -> Notes:
        """Notes of this job."""
        return self.jobs[-1]

    @property
    def last_state(self) -> str:
        """The state noted last; empty if there is none."""
        return self.words[-1].partition(":")[0] if self.words else ""

    def have_total(self, total: Total | None) -> bool:
        """Return True if a total is verified, or there is none."""
        return total is None or verified_total(total) in self.words

    def have_sum(self, state: str, sum_id: SumId | str) -> bool:
        """Return True if this silo gave its shares of a sum that rests on a state (SHA-256, hex)."""
        return summed_word(state, sum_id) in self.words

    def sums_on(self, state: str) -> list[SumId]:
        """Return the sums on a state (SHA-256, hex) of which this silo gave its shares."""
        prefix = summed_word(state, "")
        return [read_sum(word.removeprefix(prefix)) for word in self.words if word.startswith(prefix)]

    def sums_behind(self, state: str) -> list[SumId]:
        """Return the sums from whose totals a state follows."""
        prefix = _follows(state, "")
        return [read_sum(word.removeprefix(prefix)) for word in self.words if word.startswith(prefix)]


def note_verified(folder: Path, basis: bytes, sum_id: SumId, told: Told | None = None) -> None:
    """Remember that the totals behind a state of the run are verified, and a sum that rests on it.

    A silo vouches for such a state later, too: in another epoch, and in a job that resumes this one. It also
    vouches for what follows from this state and the sum's total.

    Args:
        folder: of the silo's state.
        basis: SHA-256 of the state.
        sum_id: of the sum for which this silo gives its shares.
        told: the total that the state follows from; None if there is none.
    """
    state = basis.hex()
    words = [] if told is None else [verified_total(told), _follows(state, told.sum_id)]
    note(folder, [*words, state, summed_word(state, sum_id)])


def note(folder: Path, words: Sequence[str]) -> None:
    """Add words to the notes in a silo's state folder."""
    append_durably(folder / VERIFIED, f"{' '.join(words)}\n".encode(), mode=0o600)


def verified_total(total: Total | Told) -> str:
    """Return the word for a total that is verified."""
    return f"total:{total.digest().hex()}"


def _follows(state: str, sum_id: SumId | str) -> str:
    """Return the word for a state and the sum from whose total it follows."""
    return f"after:{state}/{sum_id}"


def summed_word(state: str, sum_id: SumId | str) -> str:
    """Return the word for a sum and the state that it rests on."""
    return f"{state}:{sum_id}"


def read_sum(sum_id: str) -> SumId:
    """Read the id of a sum from its text."""
    number, phase, attempt = sum_id.split("/")
    return SumId(int(number), phase, int(attempt))
