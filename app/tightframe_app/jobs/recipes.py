"""Job recipes, from which committed and exported job folders are generated.

A job folder holds configuration as plain JSON, no code. ``tightframe jobs check`` checks that the
committed ones match their recipes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightframe.errors import JobError
from tightframe.options import unknown_name

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig

PRESETS = ("rehearsal", "full")


@dataclass(frozen=True)
class Recipe:
    """A named job.

    Attributes:
        name: of the job and of its folder.
        title: one line for ``tightframe jobs list``.
        values: job values common to all presets.
        presets: preset name -> further job values.
        sites: default silo names.
    """

    name: str
    title: str
    values: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]]
    sites: tuple[str, ...]

    def job(
        self,
        preset: str = "rehearsal",
        *,
        sites: Sequence[str] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> JobConfig:
        """Return the validated job.

        Args:
            preset: ``rehearsal`` or ``full``.
            sites: silo names; the recipe's own by default.
            changes: dotted key -> value, for example ``{"training.epochs": 2}``. If they name another
                method, data set or model, the recipe's options of the old one are dropped (``dropped``). A
                method with its own number of rounds gets it.

        With ``privacy``, values of the recipe that it excludes are replaced (``adapted``).

        Raises:
            JobError: listing all problems.
        """
        from tightframe_app.jobs.folders import (
            prepared,
        )  # imports the job schema, which listing does not need

        changes = changes or {}
        values = self._changed(preset, changes)
        values["sites"] = list(sites or self.sites)
        values["min_sites"] = minimum(len(values["sites"]))
        for key in ("sites", "min_sites"):
            if key in changes:
                values[key] = changes[key]
        excluded = _excluded(values)
        if wrong := {key: value for key, value in excluded.items() if _set_by(changes, key)}:
            line = " ".join(f"--set {text}" for text in assignments(wrong))
            raise JobError([f"privacy: Expected other values of {', '.join(wrong)} with it: {line}"])
        for key, value in excluded.items():
            set_value(values, key, value)
        return prepared(json.loads(json.dumps(values)))

    def adapted(self, preset: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that ``privacy`` replaces in the recipe, by dotted key.

        >>> get("fedncm_heart").adapted("rehearsal", {"privacy.epsilon": 2})
        {'weights': 'uniform', 'model_options.standardise': False}
        """
        values = self._changed(preset, changes)
        return {key: value for key, value in _excluded(values).items() if not _set_by(changes, key)}

    def _changed(self, preset: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe's values, changed."""
        values = self._values(preset)
        replaced = _replaced(values, changes)
        carried = _kept(values, changes, replaced)
        for kind in replaced:
            values.pop(f"{kind}_options", None)
        if carried:
            values["model_options"] = carried
        if "method" in changes and (rounds := _own_rounds(changes["method"])) is not None:
            values["rounds"] = rounds
        for key, value in changes.items():
            set_value(values, key, value)
        return values

    def dropped(self, preset: str, changes: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the recipe's options that changes drop, by kind of replaced component.

        Options that the changes themselves set are not listed.

        >>> get("fedmr_isic").dropped("rehearsal", {"dataset": "digits", "model": "small_cnn"})
        {'dataset': ['dataset_options.image_size']}
        """
        values = self._values(preset)
        replaced = _replaced(values, changes)
        carried = {f"model_options.{name}" for name in _kept(values, changes, replaced)}
        dropped = {
            kind: [
                key
                for name in values.get(f"{kind}_options", {})
                if (key := f"{kind}_options.{name}") not in {*changes, *carried}
                and f"{kind}_options" not in changes
            ]
            for kind in replaced
        }
        return {kind: keys for kind, keys in dropped.items() if keys}

    def described(self, job: JobConfig, preset: str) -> str:
        """Return the title of a job from this recipe: the recipe's own if it still applies."""
        values = self._values(preset)
        as_titled = all(
            getattr(job, key) == values.get(key, type(job).model_fields[key].default) for key in _IN_TITLE
        )
        # A title says whether training is private, not how private it is.
        if as_titled and (job.privacy is None) == (values.get("privacy") is None):
            return self.title
        from tightframe import methods
        from tightframe.config.site import dataset_of

        title = f"{methods.get(job.method).title} on {dataset_of(job)[0].title} with {job.models}"
        title += ", personal models" if job.personalise else ""
        return title if job.privacy is None else f"{title}, differential privacy"

    def _values(self, preset: str) -> dict[str, Any]:
        """Return the recipe's own job values."""
        values: dict[str, Any] = {"job_name": self.name}
        for layer in (self.values, self.presets[preset]):
            for key, value in layer.items():
                values[key] = {**values[key], **value} if isinstance(values.get(key), dict) else value
        return values


_NAMED = ("method", "dataset", "model")
_IN_TITLE = ("method", "method_options", "dataset", "dataset_options", "site_models", "personalise")


def _replaced(values: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Return the kinds (method, data set, model) that the changes replace."""
    return [kind for kind in _NAMED if kind in changes and changes[kind] != values.get(kind)]


def _kept(values: Mapping[str, Any], changes: Mapping[str, Any], replaced: Sequence[str]) -> dict[str, Any]:
    """Return the recipe's model options that carry over to another model for the same records.

    Standardisation of inputs depends on the records.
    """
    options = values.get("model_options", {})
    if list(replaced) != ["model"] or "standardise" not in options:
        return {}
    from tightframe import models

    fields = models.get(changes["model"]).options.model_fields
    return {"standardise": options["standardise"]} if "standardise" in fields else {}


def _excluded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the replacements of values that ``privacy`` excludes, by dotted key."""
    if values.get("privacy") is None:
        return {}
    options = values.get("model_options")
    rules: dict[str, tuple[Any, Any]] = {
        "weights": (values.get("weights", "exact") != "uniform", "uniform"),
        "personalise": (values.get("personalise"), False),
        "local_baseline_epochs": (values.get("local_baseline_epochs"), 0),
        # Pooled moments would be unprotected sums.
        "model_options.standardise": (isinstance(options, dict) and options.get("standardise"), False),
    }
    return {key: wanted for key, (excluded, wanted) in rules.items() if excluded}


def assignments(values: Mapping[str, Any]) -> list[str]:
    """Return values in the form of ``--set``.

    >>> assignments({"weights": "uniform", "personalise": False})
    ['weights=uniform', 'personalise=false']
    """
    return [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in values.items()]


def _set_by(changes: Mapping[str, Any], key: str) -> bool:
    """Check whether changes name a key or its object."""
    return key in changes or key.partition(".")[0] in changes


def _own_rounds(method: Any) -> int | None:
    """Return a registered method's fixed number of rounds; None for any."""
    from tightframe import methods

    return next((item.rounds for item in methods.METHODS if item.name == method), None)


def minimum(sites: int) -> int:
    """Return the default of ``min_sites``: five of six, all of three or fewer, else more than two thirds.

    More than two thirds of n is ``floor(2 n / 3) + 1``.

    >>> [minimum(n) for n in (1, 2, 3, 4, 6, 10)]
    [1, 2, 3, 3, 5, 7]
    """
    if sites <= 3:
        return sites
    return 2 * sites // 3 + 1


UPDATE_NORM, NOISY_UPDATE_NORM = 100.0, 1000.0
"""``update_norm`` of an exported job, without and with differential privacy, whose noise lengthens updates.

Ten times the longest update of a round measured with the recipes and backbones (docs/decisions.md).
"""


def for_production(job: JobConfig, given: Collection[str]) -> JobConfig:
    """Return a job with the ``update_norm`` and the ``min_sites`` that production sites require.

    Without a norm where it can have none, and with at most all of its sites.

    Args:
        given: values that stay as they are.
    """
    from tightframe.config.policy import least_sites, takes_norm
    from tightframe.rounds.setup import prepare

    options, required = prepare(job).setting.config, dict[str, Any]()
    if "update_norm" not in given and job.update_norm is None and takes_norm(job, options):
        required["update_norm"] = UPDATE_NORM if job.privacy is None else NOISY_UPDATE_NORM
    if "min_sites" not in given:
        required["min_sites"] = max(job.min_sites, min(least_sites(job, options), len(job.sites)))
    return job.model_copy(update=required)


_ISIC: Mapping[str, Any] = {"dataset": "fed_isic2019", "seed": 2019}
_ISIC_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {
        "dataset_options": {"image_size": 48},
        "model": "small_cnn",
        "rounds": 3,
        "threads": 1,
        "site_timeout": 120,
        "training": {"epochs": 4, "batch_size": 16, "learning_rate": 0.03, "momentum": 0.9},
    },
    "full": {
        "dataset_options": {"image_size": 200},
        "model": "efficientnet_b0",
        "rounds": 50,
        "threads": 4,
        "site_timeout": 4 * 3600,
        "training": {"epochs": 2, "batch_size": 64, "learning_rate": 0.01, "momentum": 0.9, "amp": True},
        "local_baseline_epochs": 20,
    },
}


def _joined(*layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return presets merged from several layers of job values, which share no key."""
    return {name: {key: value for layer in layers for key, value in layer[name].items()} for name in PRESETS}


# With differential privacy. A record needs the same noise whatever its silo's size, so small silos learn
# little: the rehearsal shows that it runs, not that it is accurate. Clipped gradients need a larger learning
# rate.
_PRIVATE: Mapping[str, Any] = {"weights": "uniform", "privacy": {"epsilon": 8.0, "delta": 1e-5}}
_PRIVATE_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {
        **_ISIC_PRESETS["rehearsal"],
        "training": {"epochs": 2, "batch_size": 32, "learning_rate": 0.1, "momentum": 0.0},
    },
    "full": {
        **_ISIC_PRESETS["full"],
        "training": {"epochs": 2, "batch_size": 256, "learning_rate": 0.5, "momentum": 0.0},
        "local_baseline_epochs": 0,
    },
}
# A class's second moments are d^2 / 2 numbers: at d = 1280 their noise drowns them.
_FEDMR_PRIVATE_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {},
    "full": {"method_options": {"mu_intra": 0.0}},
}

# FedILC's eICU experiment: its network (no ReLU after the last hidden layer), and its table's preparation.
# 920 columns are the demo's 48-hour drugs, so that one job serves the twin and the demo.
_EICU: Mapping[str, Any] = {
    "dataset": "eicu",
    "dataset_options": {
        "window": "48h",
        "silos": "regions",
        "equal_sizes": True,
        "oversample_minority": True,
    },
    "model": "mlp",
    "model_options": {"last_activation": False, "single_logit": True},
    "seed": 2022,
    "evaluation": {"models": 3},  # as for heart disease
}
_EICU_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {
        "dataset_options": {"drugs": 920, "twin_scale": 0.1},
        "model_options": {"widths": [256, 256, 128]},
        "rounds": 10,
        "threads": 1,
        "site_timeout": 120,
    },
    "full": {
        "dataset_options": {"drugs": 1399},
        "model_options": {"widths": [1024, 1024, 512]},
        "threads": 4,
        "site_timeout": 3600,
    },
}
_FEDILC_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {"method_options": {"learning_rate": 1e-3}},
    "full": {"rounds": 301},
}
_FEDAVG_EICU_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {"training": {"epochs": 1, "batch_size": 64, "learning_rate": 0.02}},
    "full": {"rounds": 50, "training": {"epochs": 1, "batch_size": 64, "learning_rate": 0.02}},
}

# One sum of frozen features. Colours and scales of the pictures' features were chosen by cross-validation on
# the training and validation records of real lesions at 32 px; classes count alike, as in balanced accuracy.
_ONE_SUM: Mapping[str, Any] = {"rounds": 1, "training": {"augment": False}, "evaluation": {"models": 1}}
_SCATTERED_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {
        "dataset_options": {"image_size": 48},
        "model_options": {"J": 3},
        "threads": 1,
        "site_timeout": 120,
    },
    "full": {
        "dataset_options": {"image_size": 200},
        "model_options": {"J": 4},
        "threads": 4,
        "site_timeout": 4 * 3600,
    },
}
# The drugs as they are; real sites accept the default way of choosing records.
_FED3R_EICU_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {
        "dataset_options": {"drugs": 920, "twin_scale": 0.1},
        "threads": 1,
        "site_timeout": 120,
    },
    "full": {"dataset_options": {"drugs": 1399}, "threads": 4, "site_timeout": 3600},
}
_FEDNCM_HEART_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {"site_timeout": 120},
    "full": {"site_timeout": 600},
}
_HEART_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {"rounds": 10, "site_timeout": 120},
    "full": {"rounds": 50, "site_timeout": 600, "local_baseline_epochs": 50},
}

_SIX = tuple(f"site-{number}" for number in range(1, 7))

RECIPES: list[Recipe] = [
    Recipe(
        "fedmr_isic",
        "FedMR (manifold reshaping) on Fed-ISIC2019 dermoscopy",
        {**_ISIC, "method": "fedmr"},
        _ISIC_PRESETS,
        _SIX,
    ),
    Recipe(
        "fedetf_isic",
        "FedETF (fixed frame, balanced loss, personal models) on Fed-ISIC2019 dermoscopy",
        {**_ISIC, "method": "fedetf", "personalise": True},
        _ISIC_PRESETS,
        _SIX,
    ),
    Recipe(
        "fedmr_isic_dp",
        "FedMR on Fed-ISIC2019 with differential privacy: DP-SGD, noisy class sums",
        {**_ISIC, **_PRIVATE, "method": "fedmr"},
        _joined(_PRIVATE_PRESETS, _FEDMR_PRIVATE_PRESETS),
        _SIX,
    ),
    Recipe(
        "fedetf_isic_dp",
        "FedETF on Fed-ISIC2019 with differential privacy: DP-SGD, noisy class prior",
        {**_ISIC, **_PRIVATE, "method": "fedetf"},
        _PRIVATE_PRESETS,
        _SIX,
    ),
    Recipe(
        "fednh_isic",
        "FedNH (normalised class prototypes) on Fed-ISIC2019 dermoscopy",
        {**_ISIC, "method": "fednh"},
        _ISIC_PRESETS,
        _SIX,
    ),
    Recipe(
        "fedavg_etf_isic",
        "FedAvg_ETF (fixed frame, global memory vectors) on Fed-ISIC2019 dermoscopy",
        {**_ISIC, "method": "fedavg_etf"},
        _ISIC_PRESETS,
        _SIX,
    ),
    Recipe(
        "fedavg_isic",
        "FedAvg, the yardstick, on Fed-ISIC2019 dermoscopy",
        {**_ISIC, "method": "fedavg"},
        _ISIC_PRESETS,
        _SIX,
    ),
    Recipe(
        "fedilc_eicu",
        "FedILC (Fishr, geometric mean) on eICU: mortality from drugs, regions as silos",
        {**_EICU, "method": "fedilc", "training": {"epochs": 1, "batch_size": 64}},
        _joined(_EICU_PRESETS, _FEDILC_PRESETS),
        _SIX[:5],
    ),
    Recipe(
        "fedavg_eicu",
        "FedAvg, the yardstick, on eICU: mortality from drugs, regions as silos",
        {**_EICU, "method": "fedavg"},
        _joined(_EICU_PRESETS, _FEDAVG_EICU_PRESETS),
        _SIX[:5],
    ),
    Recipe(
        "fedetf_heart",
        "FedETF (fixed frame, balanced loss, personal models) on Fed-Heart-Disease",
        {
            "dataset": "fed_heart_disease",
            "method": "fedetf",
            "model": "mlp",
            "model_options": {"widths": [16], "standardise": True},
            "seed": 1988,
            "threads": 1,
            "training": {"epochs": 4, "batch_size": 16, "learning_rate": 0.03, "momentum": 0.9},
            "personalise": True,
            # Few records allow few evaluations over all jobs (``evaluated_share``).
            "evaluation": {"models": 3},
        },
        _HEART_PRESETS,
        _SIX[:4],
    ),
    Recipe(
        "fed3r_isic",
        "Fed3R (ridge regression from one sum, no training) on Fed-ISIC2019 dermoscopy",
        {
            **_ISIC,
            **_ONE_SUM,
            "method": "fed3r",
            "method_options": {"priors": "balanced"},
            "model": "scattering",
            "model_options": {"colours": "rgb", "width": 256},
        },
        _SCATTERED_PRESETS,
        _SIX,
    ),
    Recipe(
        "fed3r_isic_dp",
        "Fed3R on Fed-ISIC2019 with differential privacy: one noisy release, no training",
        {
            **_ISIC,
            **_ONE_SUM,
            "method": "fed3r",
            "method_options": {"priors": "balanced"},
            "model": "scattering",
            "model_options": {"colours": "rgb", "width": 64},
            "weights": "uniform",
            "privacy": {"epsilon": 2.0, "delta": 1e-5, "spare_rounds": 0},
        },
        _SCATTERED_PRESETS,
        _SIX,
    ),
    Recipe(
        "fed3r_eicu",
        "Fed3R (ridge regression from one sum, no training) on eICU: mortality from drugs, regions as silos",
        {
            **_ONE_SUM,
            "dataset": "eicu",
            "dataset_options": {"window": "48h", "silos": "regions"},
            "method": "fed3r",
            "method_options": {"priors": "balanced"},
            "model": "identity",
            "seed": 2022,
        },
        _FED3R_EICU_PRESETS,
        _SIX[:5],
    ),
    Recipe(
        "fedncm_heart",
        "FedNCM (nearest class mean, no training) on Fed-Heart-Disease",
        {
            **_ONE_SUM,
            "dataset": "fed_heart_disease",
            "method": "fedncm",
            "model": "identity",
            "model_options": {"standardise": True},
            "seed": 1988,
            "threads": 1,
        },
        _FEDNCM_HEART_PRESETS,
        _SIX[:4],
    ),
]


def get(name: str) -> Recipe:
    """Return a recipe by name.

    Raises:
        KeyError: if there is none; the text lists the known names.
    """
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    raise KeyError(unknown_name(f"job {name!r}", name, [recipe.name for recipe in RECIPES]))


def set_value(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a value of a job, in place.

    Args:
        dotted: its key, for example ``training.epochs``.
        value: plain.
    """
    *parents, last = dotted.split(".")
    place = values
    for part in parents:
        child = place.get(part)
        place[part] = dict(child) if isinstance(child, dict) else {}
        place = place[part]
    place[last] = value
