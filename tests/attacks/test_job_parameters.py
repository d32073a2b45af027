"""A server proposes parameters of its own for a job that says others.

Who must collude to open a sum, and how many silos are in it, is the job's: each silo has its own copy of the
job, and takes nothing of this from the server.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.attacks.malicious_server import Federation, Records, hearts

from tightframe.config.policy import PolicyBlock
from tightframe.errors import SecureSumError
from tightframe.securesum.messages import Params
from tightframe.securesum.reading import keys_of

SEMI_HONEST = PolicyBlock(profile="standard", semi_honest_server=True)


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    return hearts(9)


def refused(federation: Federation, params: Params) -> str:
    with pytest.raises(SecureSumError) as caught:
        federation.ask_to_enroll("hospital-1", params)
    assert caught.value.code == "TF-601"
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"colluders": 1, "threshold": 7, "min_sites": 7}, "the number of assumed colluders to be 3"),
        ({"colluders": 4}, "the number of assumed colluders to be 3"),
        ({"threshold": 9}, "the threshold to be 7"),
        ({"min_sites": 3}, "the smallest survivor set to be 8"),
        ({"min_sites": 9}, "the smallest survivor set to be 8"),
        (
            {"trust": "semi_honest", "threshold": 5, "min_sites": 5},
            "the trust model of the server to be malicious",
        ),
        ({"slots": 256}, "the number of slots"),
        ({"slots": 1}, "the number of slots"),
        ({"schemas": {}}, "the schemas"),
        ({"weights": "uniform"}, "the weight rule"),
        ({"lineage": "job-0"}, "the lineage"),
        ({"job": "job-0"}, "the job id"),
        ({"config_sha256": bytes(32)}, "the SHA-256 of the job's configuration"),
        ({"version": "0.0.1"}, "the package version"),
    ],
    ids=str,
)
def test_what_the_job_says_is_never_the_servers(
    hospitals: dict[str, Records], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """Even where the site's own policy would accept it."""
    federation = Federation({"colluders": 3, "min_sites": 8}, hospitals, state=tmp_path, policy=SEMI_HONEST)
    assert named in refused(federation, replace(federation.params(), **changes))
    federation.ask_to_enroll("hospital-1", federation.params())


def test_every_parameter_is_the_jobs_or_has_a_rule_of_its_own() -> None:
    """A field that is added to the parameters must be decided on here."""
    jobs = {"job", "lineage", "threshold", "colluders", "slots", "schemas", "weights", "trust", "min_sites"}
    jobs |= {"config_sha256", "version"}
    assert set(keys_of(Params)) == jobs | {
        "roster",  # silos of the job, as many as the site's policy and the job's minimum ask for
        "epoch",  # only rises
        "static_open",  # shut opens less; open is held against the cohort that the site remembers
    }


def test_fields_of_a_sum_that_are_not_the_jobs_are_refused(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    """Counts declared as updates would open for any survivors."""
    federation = Federation({}, hospitals, state=tmp_path)
    honest = federation.params()
    moved = {
        name: tuple(replace(item, group="update") for item in fields)
        for name, fields in honest.schemas.items()
    }
    assert "the schemas" in refused(federation, replace(honest, schemas=moved))


def test_a_smaller_roster_has_the_jobs_colluders_for_its_size(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    """What an honest server proposes when silos are silent is accepted, and no less."""
    federation = Federation({"min_sites": 5}, hospitals, state=tmp_path)
    roster = sorted(hospitals)[:6]
    fewer = federation.params_of(roster)
    assert fewer.threshold == 5 and fewer.min_sites == 5
    assert "the threshold" in refused(federation, replace(fewer, threshold=4))
    federation.ask_to_enroll("hospital-1", fewer)
