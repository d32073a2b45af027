"""Job folders: generated, in sync, configuration only; the full preset runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tightframe import training
from tightframe.config.job import parse_job
from tightframe.errors import JobError
from tightframe.model_update import model_terms, received_model, training_terms
from tightframe.rounds import codec
from tightframe.rounds.context import SiloContext
from tightframe.rounds.contribution import LocalSilo
from tightframe.rounds.setup import prepare
from tightframe_app import recipes


@pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda recipe: recipe.name)
def test_committed_folders_are_in_sync(recipe: recipes.Recipe, root: Path) -> None:
    assert recipes.out_of_sync(recipes.job_files(recipe.job()), root / "jobs" / recipe.name) == []


def test_differences_are_found(tmp_path: Path) -> None:
    files = recipes.job_files(recipes.get("fedmr_isic").job())
    recipes.write_job(files, tmp_path / "job")
    assert recipes.out_of_sync(files, tmp_path / "job") == []
    server = tmp_path / "job" / "app" / "config" / "config_fed_server.json"
    server.write_text(server.read_text().replace('"rounds": 4', '"rounds": 5'))
    (tmp_path / "job" / "app" / "custom.py").write_text("")
    (tmp_path / "job" / "meta.json").unlink()
    problems = "\n".join(recipes.out_of_sync(files, tmp_path / "job"))
    for part in ("config_fed_server.json differs", "custom.py belongs", "meta.json is missing"):
        assert part in problems


@pytest.mark.parametrize("preset", recipes.PRESETS)
@pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda recipe: recipe.name)
def test_every_preset_is_a_valid_job_of_plain_values(
    recipe: recipes.Recipe, preset: str, tmp_path: Path
) -> None:
    files = recipes.job_files(recipe.job(preset, sites=["a", "b", "c"]), gpus=1)
    recipes.write_job(files, tmp_path / "job")
    values = recipes.read_job(tmp_path / "job")
    assert parse_job(values).roster == ("a", "b", "c")
    client = json.loads(files["app/config/config_fed_client.json"])["executors"][0]
    assert client["executor"]["args"] == values, "server and silos get the same job"
    meta = json.loads(files["meta.json"])
    assert meta["resource_spec"] == {s: {"num_of_gpus": 1, "mem_per_gpu_in_GiB": 8} for s in "abc"}
    assert meta["deploy_map"] == {"app": ["server", "a", "b", "c"]}
    # the engine builds an object from any dictionary with one of these keys
    assert not {"path", "name", "class_path", "config_type"} & {key for key, _ in _walk(values)}


def _walk(values: object) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    if isinstance(values, dict):
        for key, value in values.items():
            found += [(key, value), *_walk(value)]
    elif isinstance(values, list):
        for value in values:
            found += _walk(value)
    return found


def test_the_rehearsal_needs_no_monai() -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom tightframe_app import recipes\nfrom tightframe.rounds.setup import prepare\n"
        "prepare(recipes.get('fedmr_isic').job()).setting.build_model()\n"
        "sys.exit('monai' in sys.modules or 'nvflare' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_light_task_needs_no_torch() -> None:
    """Enrolment runs in a process of its own in the simulator; importing torch there costs seconds."""
    import subprocess
    import sys

    code = (
        "import sys, json\nfrom pathlib import Path\nimport tightframe.flare.executor\n"
        "from tightframe import __version__\n"
        "from tightframe.config.job import parse_job\nfrom tightframe.rounds.context import SiloContext\n"
        "from tightframe.rounds.silo import SiloSession\n"
        "job = parse_job(json.loads(sys.argv[1]))\n"
        "answer = SiloSession(SiloContext('site-5', job, None, run_dir=Path('.'))).handle(\n"
        "    'enroll', {'job_sha256': job.sha256(), 'version': __version__})\n"
        "assert answer['weight'] > 0 and answer['synthetic'] is True\n"
        "sys.exit('torch' in sys.modules)"
    )
    job = json.dumps(recipes.get("fedmr_isic").job().model_dump(mode="json"))
    assert subprocess.run([sys.executable, "-c", code, job], check=False).returncode == 0


def test_the_full_preset_takes_one_real_batch_at_every_silo(tmp_path: Path, images: Path | None) -> None:
    """EfficientNet-b0 at 200 px: real images where a centre has them here, the twin elsewhere."""
    job = recipes.get("fedmr_isic").job(
        "full", changes={"training.batch_size": 4, "training.amp": False, "threads": 1}
    )
    setup = prepare(job)
    state = setup.method.init_server(setup.setting, job.seed)
    (phase,) = setup.training_phases(1)
    broadcast = phase.broadcast(state)
    real = {1: "site-2", 2: "site-3", 3: "site-4", 5: "site-6"}
    spec, options = setup.dataset, setup.dataset.options.model_validate(job.dataset_options)
    for index, site in enumerate(job.roster):
        data = spec.twin(index, options)  # type: ignore[misc]
        if real.get(index) == site and images is not None:
            place = {"root": str(images), "center": index}
            data = spec.open(spec.site.model_validate(place), options)
        context = SiloContext(site, job, None, run_dir=tmp_path, records=data)
        silo = LocalSilo(context, setup, torch.device("cpu"), 1)
        model = silo.load(received_model(broadcast))
        stage = training.Stage(
            terms=(training.cross_entropy(),), optimizer=training.OptimizerSettings.of(job.training), steps=1
        )
        report = silo.fit(model, [stage])
        assert report.steps == 1 and report.records == 4
        tensors = model_terms(received_model(broadcast), model) | training_terms(report, ["cross_entropy"])
        assert any(
            float(value.abs().max()) > 0 for name, value in tensors.items() if name.startswith("update/")
        )
        for item in phase.schema.fields:
            tensors.setdefault(item.name, torch.zeros(item.shape))
        term = codec.encode(phase.schema, tensors, share=1.0, parties=6)
        assert len(term["update"]) > 4 * 4_000_000


def test_export_never_replaces_what_it_did_not_write(tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.txt"):
        recipes.write_job(recipes.job_files(recipes.get("fedmr_isic").job()), folder)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_wrong_changes_are_named() -> None:
    with pytest.raises(JobError, match=r"training\.epoch"):
        recipes.get("fedmr_isic").job(changes={"training.epoch": 2})
