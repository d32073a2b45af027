"""A server that tells one hospital a false last total, and ends the run: what the hospital has of it.

No other sum verifies that total, so nothing of what rests on it becomes the hospital's final model.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.attacks.malicious_server import Federation

from tightframe import load_model
from tightframe.errors import TightframeError
from tightframe.report.reading import SiloResults, read
from tightframe.results.files import LOCAL, MODEL, PERSONAL, UNPROVEN
from tightframe.rounds import codec
from tightframe.rounds.checkpoint import tensor_bytes
from tightframe.rounds.server.collecting import SharedState
from tightframe.rounds.silo.followed_state import next_state
from tightframe.rounds.sums.parameters import schema_name
from tightframe.securesum.messages import SumId, TermRequest

VALUES = {"model_options": {"widths": [16]}, "personalise": True}
ASKED = "hospital-2"


def ask_behind_a_false_total(federation: Federation, *kinds: str) -> None:
    """Ask one hospital for the terms that end a run, behind a false total of its last round."""
    assert federation.evidence is not None
    start, total = federation.setup.initial_state(), federation.evidence.total
    groups = {group: bytes(len(data)) for group, data in total.groups.items()}
    false = replace(total, groups=groups)
    crafted = SharedState(next_state(federation.setup, start, false, federation.applied()))
    assert crafted.sha256 != federation.shared.sha256
    for slot, kind in enumerate(kinds, 1):
        phase = federation.setup.plan.find(kind, 1, 0).carrying(True)
        schema = schema_name(f"{kind}-0", codec.specs(phase.schema, 4))
        told, seeds = false.to_bytes(), federation.evidence.seeds_of_survivors()
        request = TermRequest(slot, SumId.of(kind, 1, 0, 0), schema, b"", told, seeds)
        message = {
            "kind": kind,
            "round": 1,
            "phase": 0,
            "attempt": 0,
            "opened": {},
            "state": crafted.sha256,
            "before": federation.shared.before,
            "secure": request.to_bytes(),
        }
        federation.sessions[ASKED].handle("contribute", message)


@pytest.mark.parametrize("kinds", [("closing",), ("closing", "personal")])
def test_what_follows_from_a_false_last_total_is_no_final_model(
    federation: Federation, caplog: pytest.LogCaptureFixture, kinds: tuple[str, ...]
) -> None:
    federation.sum("train", 1)
    ask_behind_a_false_total(federation, *kinds)
    context = federation.sessions[ASKED].context
    with caplog.at_level(logging.ERROR):
        federation.sessions[ASKED].end()
    assert "TF-827" in caplog.text and str(context.run_dir / UNPROVEN) in caplog.text
    assert not [name for name in (MODEL, PERSONAL, LOCAL) if (context.run_dir / name).exists()]
    for place in ("", MODEL, PERSONAL, UNPROVEN, f"{UNPROVEN}/{MODEL}"):
        with pytest.raises(TightframeError, match=r"^TF-827: .*Compare `model_sha256`"):
            load_model(context.run_dir / place)
    for folder in (context.run_dir, context.run_dir / UNPROVEN):
        with pytest.raises(TightframeError, match=r"^TF-827: "):
            read(folder)


def test_nor_is_the_start_where_the_run_ends_for_one_hospital_at_once(federation: Federation) -> None:
    phase = federation.setup.plan.find("closing", 1, 0).carrying(True)
    schema = schema_name("closing-0", codec.specs(phase.schema, 4))
    setup = federation.session.setup_for(ASKED).to_bytes()
    message = {
        "kind": "closing",
        "round": 1,
        "phase": 0,
        "attempt": 0,
        "opened": {},
        **federation.shared.named(),
        "secure": TermRequest(0, SumId.of("closing", 1, 0, 0), schema, setup).to_bytes(),
    }
    with pytest.raises(TightframeError, match=r"^TF-525: "):
        federation.sessions[ASKED].handle("contribute", message)
    folder = federation.sessions[ASKED].context.run_dir
    assert not [name for name in (MODEL, LOCAL, UNPROVEN) if (folder / name).exists()]


def test_what_the_closing_proves_is_each_hospitals_final_model(federation: Federation) -> None:
    """The same run without a lie: nobody waits for the personal models, nor for the end."""
    federation.sum("train", 1)
    final = tensor_bytes(federation.shared.state.model)
    federation.sum("closing", 1)
    for session in federation.sessions.values():
        folder = session.context.run_dir
        assert (folder / MODEL).read_bytes() == final
        assert load_model(folder).card == report_of(folder)
    federation.sum("personal", 1)
    for session in federation.sessions.values():
        folder = session.context.run_dir
        session.end()
        assert not (folder / UNPROVEN).exists()
        assert load_model(folder / PERSONAL).card == report_of(folder)


def report_of(folder: Path) -> object:
    found = read(folder)
    assert isinstance(found, SiloResults)
    return found.report
