"""Tightframe: privacy-hardened federated learning for hospitals, on NVIDIA FLARE.

Everything that leaves a silo is a term of a sum. The names in ``__all__`` are the package's face for
notebooks, scripts and extensions. They are imported when they are used first (PEP 562), so that
``import tightframe`` stays fast and free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig, parse_job
    from tightframe.data.base import DatasetSpec
    from tightframe.errors import TightframeError
    from tightframe.federation import run, run_job
    from tightframe.inference.model import TrainedModel, load_model
    from tightframe.models.base import BackboneSpec
    from tightframe.phases import Method
    from tightframe.rounds.server.coordinator import Result
    from tightframe.rounds.setup import prepare

__version__ = "0.2.0"
__all__ = [
    "BackboneSpec",
    "DatasetSpec",
    "JobConfig",
    "Method",
    "Result",
    "TightframeError",
    "TrainedModel",
    "__version__",
    "load_model",
    "parse_job",
    "prepare",
    "run",
    "run_job",
]

_HOMES = {
    "BackboneSpec": "tightframe.models.base",
    "DatasetSpec": "tightframe.data.base",
    "JobConfig": "tightframe.config.job",
    "Method": "tightframe.phases",
    "Result": "tightframe.rounds.server.coordinator",
    "TightframeError": "tightframe.errors",
    "TrainedModel": "tightframe.inference.model",
    "load_model": "tightframe.inference.model",
    "parse_job": "tightframe.config.job",
    "prepare": "tightframe.rounds.setup",
    "run": "tightframe.federation",
    "run_job": "tightframe.federation",
}
"""Module that defines each public name."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
