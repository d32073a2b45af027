"""What a job leaves out, against the tables of the guides and the job's own hash."""

from __future__ import annotations

from tests.support.runs import job

from tightframe.config.job import config_hash
from tightframe.rounds.server import record
from tightframe.rounds.setup import prepare


def test_options_that_the_job_leaves_out_have_the_values_of_the_guides() -> None:
    of = job(method="fedmr", method_options={"mu_inter": 0.5}, dataset="digits", dataset_options={"silos": 4})
    found = record.values(prepare(of))
    options = found["method_options"]
    assert options["mu_inter"] == 0.5 and options["intra_form"] == "correlation"
    assert found["dataset_options"]["silos"] == 4 and found["dataset_options"]["partition_seed"] == 0
    assert found["model_options"] == {"widths": [8, 8, 8], "dropout": 0.0}
    said = of.model_dump(mode="json")
    assert {key: found[key] for key in said if not key.endswith("_options")} == {
        key: value for key, value in said.items() if not key.endswith("_options")
    }
    assert config_hash(said) == of.sha256() != config_hash(found), "it is what the job says that is hashed"


def test_options_of_a_head_that_the_method_replaces_are_not_among_them() -> None:
    found = record.values(prepare(job(method="fedetf", method_options={})))
    assert found["model_options"] == {"widths": [8, 8, 8]}


def test_a_silo_s_own_model_has_its_options_too() -> None:
    own = {"site-2": {"model": "mlp", "model_options": {"widths": [8]}}}
    found = record.values(prepare(job(method="fedproto", method_options={}, site_models=own)))
    options = found["site_models"]["site-2"]["model_options"]
    assert options["widths"] == [8] and options["last_activation"] is True
