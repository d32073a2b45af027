"""A data set, a backbone and a method that Tightframe finds by the entry points in pyproject.toml."""

from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from torch import nn

from tightframe.data.base import DatasetSpec, SitePath
from tightframe.errors import DataError
from tightframe.methods import fedavg
from tightframe.model_update import UPDATE
from tightframe.models.base import BackboneSpec, Options
from tightframe.models.heads import Classifier

CLASSES = ("stable", "deteriorating", "septic")


class VitalSite(Options):
    """What a site says in its local/tightframe.json: a .npz with x_FOLD (n, 6), y_FOLD (n,) for each fold."""

    file: SitePath


class VitalSigns:
    """One site's records; ``tightframe.data.base.SiloData`` says what each method returns."""

    source, synthetic = "vital signs", False

    def __init__(self, site, options):
        if not site.file.is_file():
            raise DataError(f"Expected vital signs at {site.file}, but there is no file.", code="TF-205")
        self._arrays = dict(np.load(site.file))

    def labels(self, fold):
        """Class of each record."""
        return self._arrays[f"y_{fold}"]

    def check(self, progress=None):
        """Refuse what was not measured, before anything trains."""
        if not all(np.isfinite(array).all() for array in self._arrays.values()):
            raise DataError("Expected vital signs to be finite, but some are not.", code="TF-206")

    def records(self, fold, *, augment_seed=None):
        """Pairs of (float32 (6,), label); a list is a map-style data set."""
        x, y = self._arrays[f"x_{fold}"], self._arrays[f"y_{fold}"]
        return list(zip(torch.from_numpy(x).float(), y.tolist(), strict=True))


def build(options, input_shape, num_classes):
    """A hidden layer of 16, and a linear head."""
    return Classifier(nn.Sequential(nn.Linear(*input_shape, 16), nn.ReLU()), 16, num_classes)


class MomentumOptions(fedavg.FedAvgConfig):
    """What a job may choose: how much of its last step the server repeats."""

    server_momentum: float = Field(default=0.9, ge=0, lt=1)


def plan(setting, round, rounds):
    """FedAvg's phase; only what the server does with the sum is ours: v <- m v + step, w <- w + v."""

    def update(state, totals, cohort):
        momentum, model = setting.config.server_momentum, fedavg.update(state, totals, cohort).model
        extra = dict(state.extra)
        for name, before in state.model.items():
            if UPDATE + name in totals:  # a parameter that trains, no running statistics
                extra[name] = momentum * state.extra.get(name, torch.zeros(())) + model[name] - before
                model[name] = before + extra[name]
        return state.evolve(model=model, extra=extra)

    return tuple(replace(phase, update=update) for phase in fedavg.plan(setting, round, rounds))


DATASET = DatasetSpec(
    "vital_signs", "Vital signs", CLASSES, Options, VitalSite, lambda options: (6,), VitalSigns, None, 1
)
BACKBONE = BackboneSpec("vital_mlp", "one hidden layer for vital signs", Options, build)
METHOD = replace(
    fedavg.METHOD,
    name="vital_momentum",
    title="FedAvg with server momentum",
    paper="Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution, arXiv 1909.06335",
    config=MomentumOptions,
    plan=plan,
)
