"""The run's state as this silo has computed it, kept between tasks."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tightframe.errors import RunError, TightframeError
from tightframe.files import write_atomically
from tightframe.learning.model_update import shared_template
from tightframe.models.frozen import is_frozen
from tightframe.phases import Cohort, ServerState
from tightframe.rounds import codec
from tightframe.rounds.context import Message
from tightframe.rounds.job_checks import own_tensors
from tightframe.rounds.notes import Notes
from tightframe.rounds.order import place_of
from tightframe.rounds.run_state import (
    differences,
    read_state,
    start_state,
    state_bytes,
)
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.silo.own_state import NeedsStateError
from tightframe.rounds.state_files import FOLLOWED, PRETRAINED
from tightframe.securesum.messages import Total


@dataclass(frozen=True)
class _Own:
    """A state, and this silo's knowledge of it.

    Attributes:
        sha256: hex.
        total: digest (hex) of the total that it was computed from; empty if there is none.
        computed: whether this silo computed it and vouches for it.
        sum_id: of that total; empty if there is none.
    """

    state: ServerState
    sha256: str
    total: str
    computed: bool
    sum_id: str = ""


class FollowedState:
    """A silo's own copy of the run's state.

    Args:
        folder: of the silo's state.
    """

    def __init__(self, folder: Path, setup: JobSetup, name: str, log: logging.Logger) -> None:
        self._folder, self._path = folder, folder / FOLLOWED
        self._pretrained = folder / PRETRAINED
        self._setup, self._name, self._log = setup, name, log
        self._current: _Own | None = None

    def advance(
        self, message: Message, total: Total | None, weights: Mapping[str, float]
    ) -> tuple[ServerState, bool]:
        """Return the state that an exchange rests on, computed by this silo.

        Args:
            message: of the task: ``state`` and ``before`` are the SHA-256 of the state that the exchange
                rests on, and of the one before the last opened total; ``start`` the weights of a pretrained
                start; ``state_bytes`` the state itself, if the server sends it again.
            total: the last one opened, which this exchange verifies; None if there is none.
            weights: public weights of all enrolled silos.

        Returns:
            The state, and whether this silo vouches for it: it is the start, or was verified in an earlier
            epoch or job, or this silo has computed it from the state on which it gave its shares of the total
            that this exchange verifies.

        Raises:
            NeedsStateError: if it cannot compute that state, and the server did not send it.
            RunError: TF-518 if the server's state is not the one that it names, or another than this silo's,
                or precedes the one for which this silo last gave its shares, or has another frozen encoder
                than the job's start, or if this silo missed nothing, or was sent another state after this
                total. TF-519 if it missed that state, and no total is named. TF-604 if it is not of this job.
        """
        expected, sent = message["state"], message.get("state_bytes")
        notes = Notes.read(self._folder)
        verified, mine = notes.words, notes.mine
        last = mine.last_state
        own = self._own(message)
        latest = last in ("", expected)
        # After a total, a resumed job can reach the states of the earlier job again.
        if not latest and expected in (verified if total is None else mine.words):
            raise _passed()
        if self._setup.job.evaluate_only is not None and total is None:
            self._check_named(own, expected)
        digest = "" if total is None else total.digest().hex()
        # A state that does not include the named total is not the run's: one model is not summed twice.
        # Earlier verification counts only without a total: with one, an older state could come back.
        before = total is None and expected in verified
        if own is not None and own.sha256 == expected and (total is None or own.total == digest):
            return own.state, before or (own.computed and own.total == digest and (bool(digest) or latest))
        computed = None
        began = own is not None and own.computed and not own.total and latest
        if began and total is None and not message["before"]:
            # Not `own`: small deviations from the start would add up.
            computed = start[0] if (start := self._start(message)) is not None else None
        # A state that this silo has after this same total does not include it twice.
        if own is not None and total is not None and own.sha256 == message["before"] and own.total != digest:
            # This silo does not know the state that another sum's total rests on.
            sound = own.sha256 == last and mine.have_sum(last, total.sum_id)
            following = next_state(self._setup, own.state, total, weights)
            computed, data = self._computed(following, digest, sound, str(total.sum_id))
            if computed.sha256 == expected:
                return self._keep(computed, data).state, sound
        if sent is None:
            raise NeedsStateError
        if hashlib.sha256(sent).hexdigest() != expected:
            raise RunError(
                f"Expected the state with SHA-256 {expected}, but the server sent another.", code="TF-518"
            )
        received = read_state(sent)
        if computed is None:
            if total is None and expected not in verified and (own is None or own.total or last):
                self._check_named_by_job(expected)
            self._check_missed(own, total, digest)
            self._check_form(received)
            if expected not in verified:
                self._check_encoder(received, message)
            self._log.info("%s: took the run's state from the server", self._name)
            behind = "" if total is None else str(total.sum_id)
            adopted = _Own(received, expected, digest, computed=False, sum_id=behind)
        else:
            self._compare(computed.state, received, rounded=total is None or self._setup.rounded)
            adopted = _Own(received, expected, computed.total, computed.computed, computed.sum_id)
        # A resumed run begins with a verified state; later such a state would be an earlier one again.
        resumed = own is None and total is None and expected in verified
        return self._keep(adopted, sent).state, adopted.computed or resumed

    @property
    def behind(self) -> str:
        """The sum whose total led to this silo's current state; empty if there is none."""
        return "" if self._current is None else self._current.sum_id

    @staticmethod
    def _check_named(own: _Own | None, expected: str) -> None:
        """Refuse to evaluate any model but the one that the job names by its hash.

        Raises:
            RunError: TF-505 if the model's file was not sent, TF-518 if another state is named.
        """
        if own is None:
            raise RunError(
                "Expected the model that the job names (`initial_model_sha256`) with the request, but none "
                "came: a job that evaluates only takes no other state from the server.",
                code="TF-505",
            )
        if own.sha256 != expected:
            raise RunError(
                "Expected the state of the model that the job names (`initial_model_sha256`), but the server "
                "names another: nothing was evaluated.",
                code="TF-518",
            )

    def _own(self, message: Message) -> _Own | None:
        """Return this silo's state: the stored one, or the start; None in a resumed job."""
        if self._current is None:
            self._current = self._stored()
        if self._current is None and (start := self._start(message)) is not None:
            self._keep(*start)
        return self._current

    def _start(self, message: Message) -> tuple[_Own, bytes] | None:
        """Return the run's start, recomputed, and its bytes; None if resumed, or if its file was not sent.

        A start adopted from the server is no reference for later states: the server could move on from there
        in steps that each look like rounding.
        """
        if self._setup.job.continues is not None:
            return None
        if (weights := self._weights(message)) is None and self._setup.job.initial_model_sha256 is not None:
            return None  # this silo missed the first exchanges
        state, _ = start_state(self._setup, weights)
        if weights is not None and not self._pretrained.is_file() and self._setup.job.summation == "secure":
            write_atomically(self._pretrained, weights, mode=0o600)
        return self._computed(state, "", sound=True)

    def start(self, message: Message) -> ServerState:
        """Return the state that the job starts with, or the first job of those that it continues.

        Raises:
            NeedsStateError: if the server must send the pretrained start that the job names.
            RunError: TF-505 if the server did not, or sent another.
        """
        weights, named = self._weights(message), self._setup.job.initial_model_sha256
        if weights is None and named is not None and message.get("state_bytes") is None:
            raise NeedsStateError
        return start_state(self._setup, weights)[0]

    def _weights(self, message: Message) -> bytes | None:
        """Return the weights of a pretrained start, from this request or an earlier one."""
        weights: bytes | None = message.get("start")
        if weights is None and self._pretrained.is_file():
            weights = self._pretrained.read_bytes()
        return weights

    @staticmethod
    def _computed(state: ServerState, total: str, sound: bool, sum_id: str = "") -> tuple[_Own, bytes]:
        """Return a state that this silo computed, and its bytes."""
        data = state_bytes(state)
        return _Own(state, hashlib.sha256(data).hexdigest(), total, sound, sum_id), data

    def _stored(self) -> _Own | None:
        if not self._path.is_file():
            return None
        raw = self._path.read_bytes()
        try:
            line, _, data = raw.partition(b"\n")
            described = json.loads(line)
            known = described["sha256"], described["total"], described["computed"], described["sum_id"]
            own = _Own(read_state(data), *known)
            if hashlib.sha256(data).hexdigest() != own.sha256:
                raise ValueError("another SHA-256")
        except (TightframeError, ValueError, TypeError, KeyError) as error:
            self._log.warning("%s: the stored state of the run is damaged: %s", self._name, error)
            return None
        return own

    def _keep(self, own: _Own, data: bytes) -> _Own:
        described = {"sha256": own.sha256, "total": own.total, "computed": own.computed, "sum_id": own.sum_id}
        line = json.dumps(described).encode() + b"\n"
        write_atomically(self._path, line + data, mode=0o600)
        self._current = own
        return own

    def _compare(self, computed: ServerState, received: ServerState, *, rounded: bool) -> None:
        if not rounded or (problems := differences(computed, received)):
            how = (
                f"by more than rounding: {', '.join(problems[:5])}" if rounded else "where no bit may differ"
            )
            raise RunError(
                "Expected the state that follows from the job and the totals, but the server's differs from "
                f"this silo's {how}. The server has another version of tightframe, or is not to be trusted; "
                "or a method of your own rounds (`Method.rounded`). Nothing was trained on it.",
                code="TF-518",
            )
        self._log.info("%s: the server's state differs from this silo's by rounding only", self._name)

    def _check_missed(self, own: _Own | None, total: Total | None, digest: str) -> None:
        """Refuse a state that this silo does not need, before it trains on it.

        The duration of training can depend on a single record. So it adopts a state that it cannot compute
        only once per total, and only if it has no term in this total.
        """
        if own is None:
            return
        if own.total == digest or (total is not None and self._name in total.survivors):
            raise RunError(
                "Expected the state that follows from this silo's own, because it missed nothing, or the one "
                "that the server sent behind this total before, but got another: nothing was trained on it.",
                code="TF-518",
            )

    def _check_named_by_job(self, expected: str) -> None:
        """Refuse a state before an epoch's first total, unless the job names it.

        No total verifies such a state: this silo can come back after the first one, which the others open.
        """
        job = self._setup.job
        if job.summation != "secure" or (job.withdraw is not None and expected == job.withdraw.state_sha256):
            return
        raise RunError(
            "Expected a state that this silo has verified, because no total was opened in this session yet, "
            "but it missed the one that the server sent: nothing was trained on it. It takes part again once "
            "the others' first total is opened.",
            code="TF-519",
        )

    def _check_form(self, received: ServerState) -> None:
        """Refuse a state whose model does not have this job's form."""
        own = self._setup.initial_state().model
        problems = sorted(set(own) ^ set(received.model))
        problems += [
            name
            for name in sorted(set(own) & set(received.model))
            if own[name].shape != received.model[name].shape or own[name].dtype != received.model[name].dtype
        ]
        if problems:
            raise RunError(
                f"Expected a state with this job's model, but {problems[:5]} are missing, unknown or of "
                "another form: the server runs another job or version.",
                code="TF-604",
            )

    def _check_encoder(self, received: ServerState, message: Message) -> None:
        """Refuse a state with another frozen encoder than the job's start.

        Its features are computed outside the work whose duration is held back, and cached.
        """
        setup = self._setup
        if setup.job.summation != "secure" or not is_frozen(shared_template(setup.setting)):
            return
        own, other = (
            ServerState({name: state.model[name] for name in own_tensors(received.model)})
            for state in (self.start(message), received)
        )
        if problems := differences(own, other):
            raise RunError(
                "Expected a state with the frozen encoder of the job's start, but the server's differs in "
                f"{', '.join(problems[:5])}: nothing was trained on it.",
                code="TF-518",
            )


def next_state(
    setup: JobSetup, state: ServerState, total: Total, weights: Mapping[str, float]
) -> ServerState:
    """Return the state after an exchange.

    Args:
        state: before the exchange.
        total: as opened.
        weights: public weights of all enrolled silos.

    Raises:
        RunError: TF-505 if the job plans no such exchange, or a survivor is not enrolled.
        ContributionError: TF-403 if the total does not have the size of the exchange's schema.
    """
    exchange = setup.plan.find(*place_of(total.sum_id))
    if strangers := sorted(set(total.survivors) - set(weights)):
        raise RunError(
            f"Expected a total of enrolled silos, but it is of {strangers[:3]}, which are not.", code="TF-505"
        )
    integers = codec.integer_totals(exchange.phase_for(exchange.phase.broadcast(state)).schema, total.groups)
    return exchange.advance(state, integers, Cohort.of(exchange.round, total.survivors, weights)).state


def _passed() -> RunError:
    """Return the error for a state that rests on fewer totals than this silo has verified."""
    return RunError(
        "Expected the state for which this silo gave its shares last, or a later one, but the server names "
        "an earlier one, which would be summed once more: nothing was trained on it.",
        code="TF-518",
    )
