"""Job folders: generated, in sync, configuration only; the full preset runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.fl_constant import ConfigVarName
from tests.support.runs import asked, missed
from torch.utils.data import Subset

from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry, open_data
from tightframe.data.base import Progress, SiloData
from tightframe.errors import JobError, JobFolderError
from tightframe.learning.model_update import received_model
from tightframe.methods import fedmr
from tightframe.phases import Fold, ServerState, Tensors, Totals
from tightframe.rounds import codec
from tightframe.rounds.context import SiloContext
from tightframe.rounds.riders import class_rules, evaluation
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo.contribute import Contributor
from tightframe.rounds.sums.common import Peers
from tightframe.rounds.sums.plain import PlainServer
from tightframe_app.jobs import folders, recipes


@pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda recipe: recipe.name)
def test_committed_folders_are_in_sync(recipe: recipes.Recipe, root: Path) -> None:
    assert folders.out_of_sync(folders.committed_files(recipe.job()), root / "jobs" / recipe.name) == []


@pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda recipe: recipe.name)
def test_a_lost_message_is_sent_again_within_the_time_that_a_silo_has(recipe: recipes.Recipe) -> None:
    job = recipe.job()
    client = json.loads(folders.job_files(job)["app/config/config_fed_client.json"])
    for name in (ConfigVarName.GET_TASK_TIMEOUT, ConfigVarName.SUBMIT_TASK_RESULT_TIMEOUT):
        assert 5 <= client[name] <= job.site_timeout / 2


def test_differences_are_found(tmp_path: Path) -> None:
    files = folders.job_files(recipes.get("fedmr_isic").job())
    folders.write_job(files, tmp_path / "job")
    assert folders.out_of_sync(files, tmp_path / "job") == []
    server = tmp_path / "job" / "app" / "config" / "config_fed_server.json"
    server.write_text(server.read_text().replace('"rounds": 3', '"rounds": 5'))
    (tmp_path / "job" / "app" / "custom.py").write_text("")
    (tmp_path / "job" / "meta.json").unlink()
    problems = "\n".join(folders.out_of_sync(files, tmp_path / "job"))
    for part in ("config_fed_server.json differs", "custom.py does not belong", "meta.json is missing"):
        assert part in problems


@pytest.mark.parametrize("preset", recipes.PRESETS)
@pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda recipe: recipe.name)
def test_every_preset_is_a_valid_job_of_plain_values(
    recipe: recipes.Recipe, preset: str, tmp_path: Path
) -> None:
    files = folders.job_files(recipe.job(preset, sites=["a", "b", "c"]), gpus=1)
    folders.write_job(files, tmp_path / "job")
    values = folders.read_job(tmp_path / "job")
    assert parse_job(values).roster == ("a", "b", "c")
    client = json.loads(files["app/config/config_fed_client.json"])["executors"][0]
    assert client["executor"]["args"] == values, "server and silos get the same job"
    meta = json.loads(files["meta.json"])
    assert meta["resource_spec"] == {s: {"num_of_gpus": 1, "mem_per_gpu_in_GiB": 8} for s in "abc"}
    assert meta["deploy_map"] == {"app": ["server", "a", "b", "c"]}
    # the engine builds an object from any dictionary with one of these keys
    assert not {"path", "name", "class_path", "config_type"} & {key for key, _ in _walk(values)}


FEDETF = "FedETF (fixed frame, balanced loss, personal models) on Fed-ISIC2019 dermoscopy"


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("fedetf_isic", {"rounds": 2, "training.epochs": 1, "seed": 3}, FEDETF),
        ("fedetf_isic", {"personalise": False}, "FedETF on Fed-ISIC2019 with small_cnn"),
        ("fedetf_isic", {"method": "fednh"}, "FedNH on Fed-ISIC2019 with small_cnn, personal models"),
        (
            "fedilc_eicu",
            {"dataset_options.silos": "hospitals", "dataset_options.equal_sizes": False},
            "FedILC on eICU with mlp",
        ),
        ("fedmr_isic", {"method_options.inter_support": "all"}, "FedMR on Fed-ISIC2019 with small_cnn"),
        ("fedmr_isic_dp", {"privacy.epsilon": 4}, recipes.get("fedmr_isic_dp").title),
        ("fedmr_isic_dp", {"privacy": None}, "FedMR on Fed-ISIC2019 with small_cnn"),
        (
            "fedmr_isic_dp",
            {"method_options.mu_intra": 0},
            "FedMR on Fed-ISIC2019 with small_cnn, differential privacy",
        ),
        (
            "fedavg_isic",
            {"privacy": {}, "weights": "uniform"},
            "FedAvg on Fed-ISIC2019 with small_cnn, differential privacy",
        ),
    ],
)
def test_a_title_is_told_only_where_it_is_true(name: str, changes: dict[str, Any], told: str) -> None:
    recipe = recipes.get(name)
    assert recipe.described(recipe.job(changes=changes), "rehearsal") == told


def test_options_of_what_is_replaced_do_not_stay_whatever_the_order() -> None:
    recipe = recipes.get("fedilc_eicu")
    changes = {
        "model_options.widths": [8],
        "model": "small_cnn",
        "dataset": "digits",
        "dataset_options": {"silos": 5},
        "method": "fedavg",
    }
    job = recipe.job(changes=changes)
    assert job.model_options == {"widths": [8]}, "what is asked for stays"
    assert job.dataset_options == {"silos": 5} and job.method_options == {}
    assert recipe.dropped("rehearsal", changes) == {
        "method": ["method_options.learning_rate"],
        "model": ["model_options.last_activation", "model_options.single_logit"],
    }
    same = {"method": "fedilc", "dataset": "eicu", "model": "mlp"}
    assert recipe.dropped("rehearsal", same) == {}
    assert recipe.job(changes=same) == recipe.job()


def _walk(values: object) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    if isinstance(values, dict):
        for key, value in values.items():
            found += [(key, value), *_walk(value)]
    elif isinstance(values, list):
        for value in values:
            found += _walk(value)
    return found


@pytest.mark.whole
def test_the_rehearsal_needs_no_monai() -> None:
    """Neither its backbone, the small CNN, nor what surrounds it."""
    import subprocess
    import sys

    code = (
        "import sys\nfrom tightframe_app.jobs import recipes\nfrom tightframe.rounds.setup import prepare\n"
        "prepare(recipes.get('fedmr_isic').job()).setting.build_model()\n"
        "sys.exit('monai' in sys.modules or 'nvflare' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.whole
def test_a_light_task_needs_no_torch(tmp_path: Path) -> None:
    """Enrolment and shares have processes of their own in the simulator; importing torch costs seconds."""
    import subprocess
    import sys

    code = """
import sys, json
from pathlib import Path
import tightframe.flare.executor
from tightframe import __version__
from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.errors import SecureSumError
from tightframe.rounds.context import SiloContext
from tightframe.rounds.silo.session import SiloSession

for values in json.loads(sys.argv[1]):
    job = parse_job(values)
    session = SiloSession(SiloContext('site-5', job, None, run_dir=Path(sys.argv[2], job.summation)))
    message = {'job_sha256': job.sha256(), 'version': __version__, 'secure': b''}
    try:
        answer = session.handle('enroll', message)
        assert b'weight' in answer['declaration'] and job.summation == 'plain'
    except SecureSumError as error:
        assert error.code == 'TF-604'  # an empty message, refused by the protocol
        assert job.summation == 'secure'
    assert 'torch' not in sys.modules, job.summation
"""
    sums = ("plain", "secure")
    jobs = [recipes.get("fedmr_isic").job(changes={"summation": name}) for name in sums]
    for name in sums:
        (tmp_path / name).mkdir()
    values = json.dumps([job.model_dump(mode="json") for job in jobs])
    assert subprocess.run([sys.executable, "-c", code, values, str(tmp_path)], check=False).returncode == 0


class FirstRecords:
    """A silo's records, of each fold the first few only."""

    KEPT: Mapping[str, int] = {"train": 4, "validation": 2, "test": 2}

    def __init__(self, whole: SiloData) -> None:
        self.whole = whole
        self.synthetic = whole.synthetic
        self.source = f"{whole.source}, cut for a test"

    def labels(self, fold: Fold) -> Any:
        return self.whole.labels(fold)[: self.KEPT[fold]]

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Any:
        return Subset(self.whole.records(fold, augment_seed=augment_seed), range(self.KEPT[fold]))

    def check(self, progress: Progress | None = None) -> None:
        self.whole.check(progress)


@pytest.fixture(scope="module")
def full() -> tuple[JobSetup, ServerState]:
    """The full preset with batches of four, on a CPU, and its state before round 1."""
    changes = {"training.batch_size": 4, "training.epochs": 1, "training.amp": False, "threads": 1}
    setup = prepare(recipes.get("fedmr_isic").job("full", changes=changes))
    assert setup.job.model == "efficientnet_b0" and setup.setting.input_shape == (3, 200, 200)
    return setup, setup.initial_state()


@pytest.mark.whole
@pytest.mark.parametrize(("site", "centre", "kind"), [("site-1", 0, "twin"), ("site-6", 5, "real")])
def test_the_full_preset_contributes_one_batch(
    site: str,
    centre: int,
    kind: str,
    full: tuple[JobSetup, ServerState],
    images: Path | None,
    tmp_path: Path,
) -> None:
    """FedMR's whole round at a silo: EfficientNet-b0 at 200 px, real images where a centre has them."""
    setup, state = full
    if kind == "real" and images is None:
        warnings.warn(
            f"{site}: no real images here (TIGHTFRAME_TEST_DATA), so it had the twin.", stacklevel=1
        )
        kind = "twin"
    # No class has five of the four records that are kept, so here it counts from its first one on.
    entry = SiteEntry(
        device="cpu",
        data={"fed_isic2019": {"root": str(images), "center": centre}},
        policy=PolicyBlock(min_class_count=1),
    )
    data = FirstRecords(open_data(setup.job, site, entry if kind == "real" else None))
    assert data.synthetic == (kind == "twin") and f"centre {centre}" in data.source

    number = next(number for number in range(2, setup.job.rounds) if setup.evaluates_in(number))
    (exchange,) = setup.plan.round(number)
    phase = exchange.carrying(True)
    state = class_rules.with_holders(state, np.full(8, 6.0))
    received = phase.broadcast(state)
    message = asked(setup, exchange, state)
    context = SiloContext(site, setup.job, entry, run_dir=tmp_path, records=data)
    weights, total = dict.fromkeys(setup.job.roster, 4.0), missed(setup, exchange)
    term = Contributor(context).contribute(message, Peers(weights), total=total).term
    schema = phase.schema
    sums = PlainServer(schema)
    sums.add(site, term)
    totals = codec.decode(schema, sums.open(), parties=len(setup.job.roster))

    assert all(np.isfinite(total).all() for total in totals.values())
    model = setup.setting.build_model()
    parameters = dict(model.named_parameters())
    assert sum(totals[f"update/{name}"].size for name in parameters) > 4_000_000
    # A linear bottleneck's shift is undone by the next BatchNorm, so its gradient may round to nothing.
    still = [name for name in parameters if not totals[f"update/{name}"].any()]
    assert [name for name in still if not name.endswith("._bn2.bias")] == []
    _check_statistics(model, totals, received_model(received))
    _check_prototypes(model, totals, received_model(received), data)
    assert totals[class_rules.HOLDERS].tolist() == (totals["prototype/counts"] > 0).tolist()
    _check_evaluation(totals, data)
    terms = {name: float(totals[f"training/{name}"]) for name in ("loss", *fedmr.TERMS)}
    config = setup.setting.config
    assert terms["cross_entropy"] > 0
    assert (terms["intra"] > 0) == (totals["prototype/counts"].max() >= 2), "two records of a class correlate"
    assert terms["inter"] == 0, "no prototype exists in round 1"
    assert terms["loss"] == pytest.approx(
        terms["cross_entropy"] + config.mu_intra * terms["intra"], rel=1e-4, abs=1e-6
    )


def _check_statistics(model: torch.nn.Module, totals: Totals, before: Tensors) -> None:
    """Every BatchNorm's mean and variance is in the sum and has moved."""
    names = [name for name, _ in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    layers = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(names) == 2 * len(layers) == 98
    assert {name for name in totals if name.startswith("buffer/")} == {f"buffer/{name}" for name in names}
    still = {
        name for name in names if np.array_equal(totals[f"buffer/{name}"], before[name].double().numpy())
    }
    # A 1 x 1 convolution of what a BatchNorm has centred has mean zero in the first step.
    centred = {name for name in names if "_blocks" in name and name.endswith("._bn0.running_mean")}
    assert still <= centred | {"backbone._bn1.running_mean"}
    assert all((totals[f"buffer/{name}"] > 0).all() for name in names if name.endswith("running_var"))


def _check_prototypes(model: torch.nn.Module, totals: Totals, before: Tensors, data: FirstRecords) -> None:
    """Counts are the cut's; sums are the features that the *contributed* model gives its records."""
    labels = torch.from_numpy(data.labels("train").copy())
    assert totals["prototype/counts"].tolist() == torch.bincount(labels, minlength=8).tolist()
    trained = {
        name: tensor.double() + torch.from_numpy(totals[f"update/{name}"])
        if f"update/{name}" in totals
        else torch.from_numpy(totals.get(f"buffer/{name}", tensor.numpy()))
        for name, tensor in before.items()
    }
    model.load_state_dict(trained)
    inputs = torch.stack([data.records("train")[index][0] for index in range(len(labels))])
    with torch.no_grad():
        features = model.eval().features(inputs)  # type: ignore[operator]
    expected = torch.zeros(8, features.shape[1]).index_add_(0, labels, features)
    largest = float(expected.abs().max())
    assert largest > 1e-3, "features of nothing would agree with anything"
    np.testing.assert_allclose(totals["prototype/feature_sums"], expected, rtol=0, atol=1e-3 * largest)


def _check_evaluation(totals: Totals, data: FirstRecords) -> None:
    """Each record of the cut is counted once."""
    for fold in evaluation.FOLDS:
        labels = data.labels(fold)
        confusion = totals[f"evaluation/{fold}/confusion"]
        assert confusion.sum() == len(labels) == 2
        assert confusion.sum(1).tolist() == np.bincount(labels, minlength=8).tolist()
        scores = totals[f"evaluation/{fold}/scores"]
        assert scores.sum(2).tolist() == [[n, 2 - n] for n in np.bincount(labels, minlength=8)]
        assert totals[f"evaluation/{fold}/loss"] > 0


def test_export_never_replaces_what_it_did_not_write(tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(JobFolderError, match=r"thesis\.txt"):
        folders.write_job(folders.job_files(recipes.get("fedmr_isic").job()), folder)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_wrong_changes_are_named() -> None:
    with pytest.raises(JobError, match=r"training\.epoch"):
        recipes.get("fedmr_isic").job(changes={"training.epoch": 2})


@pytest.mark.parametrize("preset", recipes.PRESETS)
def test_fedmr_weighs_its_intra_class_term_alike_at_every_feature_width(preset: str) -> None:
    """A mean squared correlation means the same at d = 128 and 1,280, so that the default serves both."""
    config = prepare(recipes.get("fedmr_isic").job(preset)).setting.config
    assert isinstance(config, fedmr.FedMRConfig)
    assert (config.intra_form, config.mu_intra) == ("correlation", 0.4)


def test_recipes_differ_in_their_methods_only() -> None:
    ours = {"job_name", "method", "method_options", "personalise"}
    for preset in recipes.PRESETS:
        first, *others = (
            recipe.job(preset).model_dump(exclude=ours)
            for recipe in recipes.RECIPES
            if recipe.name.endswith("_isic") and recipe.values["method"] != "fed3r"  # trains nothing
        )
        assert len(others) == 4
        assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({}, 3),
        ({"method": "ccvr"}, 4),
        ({"start": "fed3r"}, 4),
        ({"method": "scaffold", "training.momentum": 0}, 4),
    ],
)
def test_an_exported_job_has_the_sites_that_production_asks_of_its_method(
    changes: dict[str, Any], least: int
) -> None:
    sites = ["north", "east", "south", "west"]
    job = recipes.get("fedavg_isic").job("rehearsal", sites=sites, changes=changes)
    assert recipes.for_production(job, ()).min_sites == least
    three = recipes.get("fedavg_isic").job("rehearsal", sites=sites[:3], changes=changes)
    assert recipes.for_production(three, {"update_norm"}).min_sites == 3, (
        "which sites refuse where it is too few (TF-614)"
    )


@pytest.mark.parametrize("sites", range(4, 100))
def test_the_default_minimum_is_the_least_number_over_two_thirds(sites: int) -> None:
    assert recipes.minimum(sites) == min(n for n in range(sites + 1) if 3 * n > 2 * sites)
