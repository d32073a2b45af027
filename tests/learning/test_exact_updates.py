"""Updates known as they are summed: through the codec that every contribution takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.jobs import SMALL
from torch import nn

from tightframe.errors import JobError
from tightframe.learning.exact_updates import as_summed, exact_update_fields, silos_ever
from tightframe.phases import Cohort, Schema, Setting
from tightframe.rounds import codec
from tightframe.rounds.codec import unpack
from tightframe.rounds.setup import prepare


def _setting(norm: float | None) -> Setting:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))

    return Setting(
        config=None,
        num_classes=2,
        input_shape=(40,),
        build_model=build,
        local=SimpleNamespace(),
        update_norm=norm,
    )


def _terms(setting: Setting, scale: float) -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(3)
    return {
        item.name: scale * torch.randn(item.shape, generator=stream) for item in exact_update_fields(setting)
    }


def _through_the_sum(schema: Schema, tensors: Any) -> Any:
    """One silo's term, encoded as it is sent and decoded as a total."""
    sent = codec.encode(schema, tensors, share=0.3, parties=5)
    totals = {**unpack(schema, "update", sent["update"]), **unpack(schema, "static", sent["static"])}
    shaped = {item.name: totals[item.name].reshape(item.shape) for item in schema.fields}
    return codec.decode(schema, shaped, parties=5)


@pytest.mark.parametrize(
    ("norm", "scale"),
    [
        *[(None, 0.3), (1.0, 0.3), (1.0, 1e-3), (0.001, 0.3), (8.0, 1e-9)],
        *[(500.0, 0.3), (500.0, 3.0), (500.0, 30.0), (100.0, 3.0)],  # beyond the bound of 8
    ],
)
def test_what_the_silo_knows_is_what_the_sum_holds(norm: float | None, scale: float) -> None:
    setting = _setting(norm)
    schema = Schema(exact_update_fields(setting))
    terms = _terms(setting, scale)
    known = as_summed(terms, norm=norm, bound=setting.update_bound)
    summed = _through_the_sum(schema, known)
    for name, item in known.items():
        if name.startswith("update/"):
            assert torch.equal(torch.as_tensor(summed[name]), item), name
            assert item.dtype == torch.float64
    # It is the update that would have been summed anyway, up to the rounding.
    usual = _through_the_sum(schema, terms)
    size = sum(item.size for item in schema.fields)
    for name, item in known.items():
        torch.testing.assert_close(torch.as_tensor(usual[name]), item.double(), rtol=0, atol=size * 2.0**-24)
    if norm is not None:
        updates = torch.cat([item.flatten() for name, item in known.items() if name.startswith("update/")])
        assert float(updates.norm()) <= norm


def test_a_norm_below_the_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="`update_norm` to be above"):
        as_summed(_terms(_setting(None), 1.0), norm=1e-7, bound=8.0)
    with pytest.raises(ValueError, match="`update_norm` to be above"):
        exact_update_fields(_setting(1e-7))


@pytest.mark.parametrize("method", ["feddyn", "feddc"])
def test_a_job_with_such_a_norm_is_refused_before_it_runs(method: str) -> None:
    training = {"epochs": 1, "batch_size": 32, "learning_rate": 0.05, "momentum": 0.0}
    with pytest.raises(JobError, match="`update_norm` to be above"):
        prepare({**SMALL, "method": method, "training": training, "update_norm": 1e-7})


def test_silos_are_those_ever_enrolled() -> None:
    cohort = Cohort(1, {"a": 1.0, "b": 1.0}, 1.0, enrolled=4)
    assert int(silos_ever(torch.tensor(0), cohort)) == 4
    assert int(silos_ever(torch.tensor(6), cohort)) == 6
    with pytest.raises(ValueError, match="enrolled"):
        silos_ever(torch.tensor(0), Cohort(1, {"a": 1.0, "b": 1.0}, 1.0, enrolled=1))
