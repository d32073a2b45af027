"""A job of any method on any data set: ``tightframe jobs export --method``, ``--data`` or ``--contract``.

A recipe of the pair is used if there is one. Otherwise the job has the data set's own setting with the
method's preset (``presets``); the job's validation refuses pairs that cannot be combined. A contract alone
gives the job that sums statistics of the sites' tables before training (``--statistics``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightframe.errors import JobError
from tightframe.files import quoted
from tightframe_app.jobs import recipes
from tightframe_app.jobs.folders import prepared
from tightframe_app.jobs.presets import of
from tightframe_app.jobs.recipes import Recipe

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig
    from tightframe.data.contract import Contract

BASES: Mapping[str, str] = {
    "fed_isic2019": "fedavg_isic",
    "eicu": "fedavg_eicu",
    "fed_heart_disease": "fedetf_heart",
}
"""Data set -> recipe with a pair's data, model and training."""
ONE_SUM_BASES: Mapping[str, str] = {
    "fed_isic2019": "fed3r_isic",
    "eicu": "fed3r_eicu",
    "fed_heart_disease": "fedncm_heart",
}
"""Data set -> recipe for methods of one sum, which need a frozen encoder."""

TABLE_BINS = 8
"""Score bins of a job on the sites' own tables."""


def pair(method: str, dataset: str) -> Recipe:
    """Return the recipe of a pair.

    Args:
        method: one of ``tightframe methods``.
        dataset: ``fed_isic2019``, ``eicu`` or ``fed_heart_disease``.

    Raises:
        JobError: if there is no such method, or no setting for that data set.
    """
    from tightframe import methods

    spec = methods.get(method)  # refuses an unknown method before an unknown data set
    if dataset not in BASES:
        raise JobError(
            [
                f"there is no setting for the data set {dataset!r}, only for {sorted(BASES)}; "
                "for another one export a job and change it with --set dataset=..."
            ]
        )
    for recipe in recipes.RECIPES:
        values = recipe.values
        if (values["method"], values["dataset"]) == (method, dataset) and "privacy" not in values:
            return recipe
    bases = BASES if spec.one_sum is None else ONE_SUM_BASES
    return _with_method(recipes.get(bases[dataset]), method, dataset)


def pair_with_contract(method: str, path: Path) -> Recipe:
    """Return the recipe of a method on the tables or pictures of a contract.

    The setting of a table is that of heart disease, with more rounds: an ``mlp`` with one hidden layer, whose
    inputs are standardised by pooled moments. A method of one sum gets the values themselves as features.
    That of pictures is Fed-ISIC2019's: a small network; for a method of one sum scattering features. Volumes
    get a ``ResNet10`` of MONAI, and for one sum random features.

    Args:
        method: one of ``tightframe methods``.
        path: of the contract, as ``tightframe data init`` writes it.

    Raises:
        JobError: if there is no such method, or the contract is wrong, listing all its problems.
    """
    from tightframe import methods

    contract = read_contract(path)
    spec = methods.get(method)
    if "picture" in contract:
        return _with_method(
            _of_pictures(contract, one_sum=spec.start is not None), method, str(contract["title"])
        )
    base = recipes.get(BASES["fed_heart_disease"])
    table_values: dict[str, Any] = {
        "dataset": "table",
        "dataset_options": {"contract": contract},
        # A hospital of a few hundred records may open such histograms (``evaluated_share``, TF-627).
        "evaluation": {**base.values["evaluation"], "score_bins": TABLE_BINS},
    }
    if spec.start is not None:
        table_values |= {"model": "identity", "model_options": {"standardise": True}}
    presets = {name: {**base.presets[name], "rounds": rounds} for name, rounds in _TABLE_ROUNDS.items()}
    if spec.own_model is not None:  # pooled moments and a baseline need a global model
        table_values["model_options"] = {**base.values["model_options"], "standardise": False}
        for layer in presets.values():
            layer.pop("local_baseline_epochs", None)
    base = replace(base, name="of_table", values={**base.values, **table_values}, presets=presets)
    return _with_method(base, method, str(contract["title"]))


def _of_pictures(contract: dict[str, Any], *, one_sum: bool) -> Recipe:
    """Return the recipe of pictures, with a model that takes their size."""
    from tightframe.data.images.contract import PictureContract

    base, picture = recipes.get(BASES["fed_isic2019"]), PictureContract.model_validate(contract).picture
    values = {**base.values, "dataset": "images", "dataset_options": {"contract": contract}}
    presets = {name: dict(layer) for name, layer in base.presets.items()}
    for layer in presets.values():
        layer.pop("dataset_options")
        if picture.dimensions == 3:
            model: dict[str, Any] = {"model": "monai", "model_options": {"network": "ResNet10"}}
            model = {"model": "random_features", "model_options": {"width": 256}} if one_sum else model
        elif one_sum:
            # As on Fed-ISIC2019: wavelets cover a quarter of the smaller side, at most 16 pixels.
            scales = max(1, min(4, min(picture.size).bit_length() - 3))
            options = {"J": scales, "width": 256} | ({"colours": "rgb"} if picture.channels == 3 else {})
            model = {"model": "scattering", "model_options": options}
        else:
            model = {}
        layer |= model
        if one_sum:
            layer["training"] = {**layer["training"], "augment": False}
            layer.pop("local_baseline_epochs", None)
    return replace(base, name="of_pictures", values=values, presets=presets)


def form_of(values: Mapping[str, Any]) -> type[Contract]:
    """Return the class of a contract: of pictures if it has a ``picture``, else of a table."""
    from tightframe.data.contract import Contract
    from tightframe.data.images.contract import PictureContract

    return PictureContract if "picture" in values else Contract


def read_contract(path: Path) -> dict[str, Any]:
    """Return the values in a contract's file, for the job.

    Raises:
        JobError: TF-101, listing all problems.
    """
    from pydantic import ValidationError

    from tightframe.options import listed

    form: Any = None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        form = form_of(values if isinstance(values, dict) else {})
        form.model_validate(values)
    except FileNotFoundError:
        raise JobError([f"contract: Expected one at {path}, but there is no such file"]) from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            raise JobError(listed(error, "contract.", form)) from None
        raise JobError([f"contract: Expected {path} to be readable JSON, but got: {error}"]) from None
    return dict(values)


_TABLE_ROUNDS = {"rehearsal": 20, "full": 100}


def _with_method(base: Recipe, method: str, dataset: str) -> Recipe:
    """Return a data set's recipe with another method."""
    from tightframe import methods

    spec, preset = methods.get(method), of(method)
    values: dict[str, Any] = {key: value for key, value in base.values.items() if key != "method_options"}
    values |= {"method": method, "personalise": preset.own_models}
    if spec.rounds == 1:
        values["evaluation"] = {**values.get("evaluation", {}), "models": 1}
    presets = {name: dict(layer) for name, layer in base.presets.items()}
    # With FedROD's default options the backbone keeps its own head.
    brings_head = spec.head is not None and method != "fedrod"
    for layer in (values, *presets.values()):
        layer.pop("method_options", None)
        if spec.rounds is not None and "rounds" in layer:
            layer["rounds"] = spec.rounds
        if "training" in layer:
            layer["training"] = {**layer["training"], **preset.training}
        if brings_head and "model_options" in layer:
            # Drop options of the backbone's own head, which the method replaces.
            layer["model_options"] = {
                name: value for name, value in layer["model_options"].items() if name not in _head_options()
            }
    if preset.training and not any("training" in layer for layer in (values, *presets.values())):
        values["training"] = dict(preset.training)
    if preset.options:
        values["method_options"] = dict(preset.options)
    name = f"{method}_{base.name.partition('_')[2]}"
    return replace(base, name=name, title=f"{spec.title} on {dataset}", values=values, presets=presets)


def added(job: JobConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a method's preset sets in a job, by dotted key, without changed ones."""
    preset, training = of(job.method), job.training.model_dump()
    values: dict[str, Any] = {"personalise": True} if job.personalise else {}
    values |= {f"training.{key}": value for key, value in preset.training.items() if training[key] == value}
    options = preset.options.items()
    values |= {
        f"method_options.{key}": value for key, value in options if job.method_options.get(key) == value
    }
    return {key: value for key, value in values.items() if key not in changes}


def _head_options() -> tuple[str, ...]:
    from tightframe.rounds.job_checks import HEAD_OPTIONS

    return HEAD_OPTIONS


STATISTICS_SITES = ("site-1", "site-2", "site-3", "site-4")
LONGEST_TITLE = 50


def statistics_of(path: Path, sites: Sequence[str] | None, changes: Mapping[str, Any]) -> JobConfig:
    """Return the job that sums statistics by a contract.

    Args:
        path: of the contract, as ``tightframe data init`` writes it.
        sites: silos; four by default.
        changes: dotted key -> value, for example ``{"privacy.epsilon": 2}``.

    Raises:
        JobError: listing every problem of contract and values.
    """
    from tightframe.config.job import STATISTICS_METHOD, STATISTICS_MODEL

    contract = read_contract(path)
    if "picture" in contract:
        raise JobError(
            [
                f"{path}: statistics are of tables only, but this contract is of pictures; for a site's own "
                "pictures take `tightframe data describe`"
            ]
        )
    roster = list(sites or STATISTICS_SITES)
    title = re.sub(r"[^A-Za-z0-9]+", "_", str(contract["title"])).strip("_").lower()[:LONGEST_TITLE]
    values: dict[str, Any] = {
        "job_name": f"statistics_{title}".rstrip("_"),
        "method": STATISTICS_METHOD,
        "dataset": "table",
        "dataset_options": {"contract": contract},
        "model": STATISTICS_MODEL,
        "sites": roster,
        "min_sites": recipes.minimum(len(roster)),
        "rounds": 0,
        "weights": "uniform",
        "statistics": {},
        "threads": 1,
        "site_timeout": 120,
    }
    for key, value in changes.items():
        recipes.set_value(values, key, value)
    if isinstance(values.get("privacy"), dict):
        # One release of all silos needs no reserve for a second, and each share of noise is smaller.
        values["privacy"] = {"spare_rounds": 0, **values["privacy"]}
        if values.get("summation", "secure") == "secure":
            values.setdefault("whole_sums", True)
    return prepared(json.loads(json.dumps(values)))


def lines_of_statistics(job: JobConfig, folder: Path) -> list[str]:
    """Describe the written folder, and how to run it."""
    where = quoted(folder)
    noise = "exact" if job.privacy is None else f"noisy, epsilon {job.privacy.epsilon:g}"
    title = job.dataset_options["contract"]["title"]
    return [
        f"{folder}: statistics of {title}, {noise}, over {', '.join(job.roster)}; no training",
        f"run it here:  tightframe simulate {where} --site-config FILE",
        "  (without --site-config on generated records)",
        f"or at a federation:  tightframe jobs submit {where}",
    ]
