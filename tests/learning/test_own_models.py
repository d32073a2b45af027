"""Models that silos have for themselves, in secure sums of which silos drop out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.methods import lossy
from tests.support.runs import FOUR

from tightframe import methods
from tightframe.config.job import OWN_MODELS
from tightframe.rounds.silo.own_state import proposed_in


def test_the_names_are_those_of_the_registry() -> None:
    assert {method.name for method in methods.METHODS if method.own_model is not None} == OWN_MODELS


@pytest.mark.whole
@pytest.mark.parametrize("method", ["local_only", "fedproto"])
def test_a_drop_out_costs_the_others_nothing(method: str, tmp_path: Path) -> None:
    """Counts and class sums stay shut then; that the others have trained is opened all the same."""
    lost = {(2, "site-4")}
    lossy.run(method, tmp_path, lost, rounds=2, model_options={"widths": [8]})
    found = {site: next((tmp_path / site).rglob("committed.safetensors")) for site in FOUR}
    rounds = {site: proposed_in(path) for site, path in found.items()}
    assert rounds.pop("site-4") == "1/train-0/0", "its own second round was not summed"
    assert set(rounds.values()) == {"2/train-0/0"}
