"""A data set, a backbone and a method that Tightframe finds by the entry points in pyproject.toml."""

from pydantic import Field
from torch import nn

from tightframe.data.arrays import ArrayData
from tightframe.data.base import DatasetSpec, SitePath
from tightframe.learning import halves
from tightframe.learning.server_optimizers import sgd_step
from tightframe.models.base import BackboneSpec
from tightframe.models.heads import Classifier
from tightframe.options import StrictModel

CLASSES = ("stable", "deteriorating", "septic")


class VitalSite(StrictModel):
    """What a site says in its local/tightframe.json: a .npz with x_FOLD (n, 6), y_FOLD (n,) for each fold."""

    file: SitePath


def open_site(site, options):
    """One site's records, whose every value is checked before anything trains."""
    return ArrayData.read(site.file, source="vital signs", num_classes=len(CLASSES))


def build(options, input_shape, num_classes):
    """A hidden layer of 16, and a linear head."""
    return Classifier(nn.Sequential(nn.Linear(*input_shape, 16), nn.ReLU()), 16, num_classes)


class MomentumOptions(StrictModel):
    """What a job may choose: how much of its last step the server repeats."""

    server_momentum: float = Field(default=0.9, ge=0, lt=1)


def parts(setting):
    """Silos train as in FedAvg; with their mean step d the server does v <- m v + d, w <- w + v."""

    def step(model, means, kept):
        downhill = {name: -mean for name, mean in means.items()}
        momentum = setting.config.server_momentum
        return sgd_step(model, downhill, kept, learning_rate=1.0, momentum=momentum)

    return halves.plain_training(), halves.stepping(step)


DATASET = DatasetSpec(
    "vital_signs", "Vital signs", CLASSES, StrictModel, VitalSite, lambda options: (6,), open_site, None, 1
)
BACKBONE = BackboneSpec("vital_mlp", "one hidden layer for vital signs", StrictModel, build)
METHOD = halves.composed_method(
    name="vital_momentum",
    title="FedAvg with server momentum",
    paper="Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution, arXiv 1909.06335",
    config=MomentumOptions,
    parts=parts,
)
