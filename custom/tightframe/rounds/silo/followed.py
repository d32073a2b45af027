"""The run's state as this silo has computed it, kept between tasks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from tightframe.errors import RunError, TightframeError
from tightframe.files import write_atomically
from tightframe.phases import ServerState
from tightframe.rounds.context import FOLLOWED, VERIFIED, Message
from tightframe.rounds.following import differences, next_state, read_state, start_state, state_bytes
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.silo.state import NeedsStateError
from tightframe.securesum.messages import Total


class FollowedState:
    """A silo's own copy of the run's state.

    Args:
        folder: of the silo's state.
        setup: of the job.
        name: of the silo.
        log: of the silo.
    """

    def __init__(self, folder: Path, setup: JobSetup, name: str, log: logging.Logger) -> None:
        self._path, self._verified = folder / FOLLOWED, folder / VERIFIED
        self._setup, self._name, self._log = setup, name, log
        self._current: tuple[str, ServerState] | None = None

    def advance(
        self, message: Message, total: Total | None, weights: Mapping[str, float]
    ) -> tuple[ServerState, bool]:
        """Return the state that an exchange rests on, computed here.

        Args:
            message: of the task: ``state`` and ``before`` are the SHA-256 of the state that the exchange
                rests on, and of the one before the last opened total; ``start`` the weights of a pretrained
                start; ``state_bytes`` the state itself, if the server sends it again.
            total: the last one opened; None if there is none.
            weights: public weights of all enrolled silos.

        Returns:
            The state, and whether this silo computed it (now or before), so that its signature says more
            than that the server sent it.

        Raises:
            NeedsStateError: if it cannot compute that state, and the server did not send it.
            RunError: TF-518 if the server's state is not the one that it names, or another than this silo's.
                TF-604 if it is no state of this job.
        """
        wanted, sent = message["state"], message.get("state_bytes")
        sha256, own = self._own(message)
        if own is not None and sha256 == wanted:
            return own, True
        computed = own if total is None and not message["before"] else None
        if own is not None and total is not None and sha256 == message["before"]:
            computed = next_state(self._setup, own, total, weights)
            if _sha256(computed) == wanted:
                return self._keep(computed, wanted), True
        if sent is None:
            raise NeedsStateError
        if hashlib.sha256(sent).hexdigest() != wanted:
            raise RunError(
                f"Expected the state with SHA-256 {wanted}, but the server sent another.", code="TF-518"
            )
        received = read_state(sent)
        if computed is not None:
            self._compare(computed, received)
        else:
            self._check_form(received)
            self._log.info("%s: took the run's state from the server", self._name)
        return self._keep(received, wanted), computed is not None or wanted in self._verified_before()

    def _own(self, message: Message) -> tuple[str, ServerState | None]:
        """Return this silo's state with its hash: the stored one, or the start; None after a resumption."""
        if self._current is None:
            self._current = self._stored()
        if self._current is None:
            if self._setup.job.resume is not None:
                return "", None
            weights = message.get("start")
            if weights is None and self._setup.job.initial_model_sha256 is not None:
                return "", None  # this silo missed the first exchanges
            state, _ = start_state(self._setup, weights)
            self._keep(state, _sha256(state))
        assert self._current is not None  # noqa: S101 - set above
        return self._current

    def _stored(self) -> tuple[str, ServerState] | None:
        if not self._path.is_file():
            return None
        data = self._path.read_bytes()
        try:
            return hashlib.sha256(data).hexdigest(), read_state(data)
        except TightframeError as error:
            self._log.warning("%s: the stored state of the run is damaged: %s", self._name, error)
            return None

    def _keep(self, state: ServerState, sha256: str) -> ServerState:
        write_atomically(self._path, state_bytes(state), mode=0o600)
        self._current = (sha256, state)
        return state

    def _compare(self, computed: ServerState, received: ServerState) -> None:
        if problems := differences(computed, received):
            raise RunError(
                "Expected the state that follows from the job and the totals, but the server's differs from "
                f"this silo's by more than rounding: {', '.join(problems[:5])}. The server has another "
                "version of tightframe, or is not to be trusted: nothing was trained on it.",
                code="TF-518",
            )
        self._log.info("%s: the server's state differs from this silo's by rounding only", self._name)

    def _check_form(self, received: ServerState) -> None:
        """Refuse a state whose model is not of this job's form."""
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

    def _verified_before(self) -> frozenset[str]:
        """Return hashes of the states whose totals this silo has verified, in this job or those before it."""
        return frozenset(self._verified.read_text().split()) if self._verified.is_file() else frozenset()


def _sha256(state: ServerState) -> str:
    return hashlib.sha256(state_bytes(state)).hexdigest()
