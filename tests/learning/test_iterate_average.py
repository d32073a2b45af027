"""The mean of the last models: against torch's own, after drop-outs and resumed runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.rounds.server import test_resume
from tests.support import jobs, runs
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tightframe.config.job import JobConfig, parse_job
from tightframe.errors import JobError
from tightframe.learning import iterate_average
from tightframe.learning.iterate_average import COUNT, SUM
from tightframe.phases import Cohort, Phase, Schema, ServerState
from tightframe.results.files import CHECKPOINT, MODEL
from tightframe.results.rows import Row
from tightframe.rounds.plan import advance
from tightframe.rounds.server import resume
from tightframe.rounds.setup import prepare

SITES = ["site-1", "site-2", "site-3", "site-4"]
HEART = {**jobs.HEART, "job_name": "averaged", "method": "fedavg", "seed": 5, "summation": "plain"}
HEART["evaluation"] = {"models": 1}  # the last one's is looked at
HEART["training"] = {**HEART["training"], "learning_rate": 0.02}


def job(**changes: Any) -> JobConfig:
    return parse_job({**HEART, **changes})


def train(
    wanted: JobConfig, folder: Path
) -> tuple[list[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]:
    """Run a job: the models of all rounds but the last, from their checkpoints, and the final one."""
    models = []

    def look(row: Row) -> None:
        if row.kind == "train" and row.round > 1 and row.phase == 0:
            models.append(dict(resume.read(folder / "server" / CHECKPOINT)[0].state.model))

    return models, test_resume.run_job(wanted, folder=folder, on_round=look).state.model


class Holder(nn.Module):
    """A state dict as a module, for torch's averaging."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, item in sorted(tensors.items()):
            self.register_buffer(name.replace(".", "/"), item.clone())


def torch_mean(models: list[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    averaged = AveragedModel(Holder(models[0]).double(), use_buffers=True)
    for model in models:
        averaged.update_parameters(Holder(model).double())
    return {name.replace("/", "."): item for name, item in averaged.module.state_dict().items()}


FEW_STEPS = {"epochs": 10, "match_steps": 10}
"""Of CReFF's server; all that it takes by default are in ``tests/methods/test_defaults.py``."""
METHODS = ["fedavg", "fedmr", "fedbabu", "fedcurv", "fedilc", "creff"]
"""With class sums, a head that stays, a state beside the model, two phases a round, training at the server.

The sums are beside any method's state, which does not see them (``counting``).
"""


@pytest.mark.whole
@pytest.mark.parametrize("method", METHODS)
def test_the_final_model_is_torchs_mean_of_the_last_rounds_models(method: str, tmp_path: Path) -> None:
    given = {"fedilc": {"learning_rate": 1e-3}, "creff": FEW_STEPS}
    options = {"method_options": given.get(method, {}), "class_rules": "off"}
    before, last = train(job(method=method, **options), tmp_path / "last")
    same, mean = train(job(method=method, average_last=2, **options), tmp_path / "mean")
    assert len(before) == 2 and all(
        torch.equal(one[name], other[name]) for one, other in zip(before, same, strict=True) for name in one
    ), "silos train from each round's own model"
    expected = torch_mean([before[1], last])
    names = iterate_average.averaged_names(prepare(job(method=method, **options)).setting)
    assert names
    for name, item in mean.items():
        wanted = expected[name] if name in names else last[name].double()
        torch.testing.assert_close(item.double(), wanted, rtol=0, atol=1e-6)
    assert any(not torch.equal(mean[name], last[name]) for name in names)


def test_the_mean_is_what_is_evaluated_and_written(tmp_path: Path) -> None:
    (_, first), last = train(job(), tmp_path / "last")
    _, mean = train(job(average_last=2), tmp_path / "mean")
    written = safetensors.torch.load_file(tmp_path / "mean" / "server" / MODEL)
    assert all(torch.equal(written[name], mean[name]) for name in mean)
    made = test_resume.rows(tmp_path / "mean")[-2]
    assert (made["kind"], made["round"]) == ("train", 3)
    model = prepare(job()).setting.build_model()
    model.load_state_dict({name: (first[name].double() + last[name].double()).div(2) for name in mean})
    model.eval()
    hits = count = 0
    with torch.no_grad():
        for site in SITES[:3]:
            for inputs, label in runs.heart(site).records("test"):
                hits += int(model(inputs[None]).argmax(1)) == label
                count += 1
    assert made["evaluation"]["test"]["accuracy"] == pytest.approx(hits / count)


@pytest.mark.whole
def test_a_resumed_run_has_the_same_mean_bit_for_bit(tmp_path: Path) -> None:
    """Stopped in round 4 of 5, two of the four models that the mean is of are in its checkpoint."""
    wanted = job(rounds=5, average_last=4, method="scaffold", summation="secure")
    whole = test_resume.run_job(wanted, folder=tmp_path / "whole")
    again = test_resume.stopped(wanted, tmp_path / "broken", number=4)
    kept = resume.read(tmp_path / "broken" / "server" / CHECKPOINT)[0].state.extra
    assert int(kept[COUNT]) == 2
    found = test_resume.run_job(again, folder=tmp_path / "resumed", stopped=tmp_path / "broken")
    assert test_resume.same(found.state.model, whole.state.model)
    assert not any(name.startswith("iterates/") for name in found.state.extra)


@pytest.mark.whole
def test_silos_compute_the_mean_themselves_also_after_a_drop_out(tmp_path: Path) -> None:
    """Secure sums with verified totals: no model is sent to a silo that was there throughout."""

    def silent(task: str, site: str, request: runs.Message) -> bool:
        return task == "contribute" and runs.in_round(request, 2) and site == "site-4"

    result, wire = runs.run(runs.job(method="fedavg", rounds=3, average_last=3), tmp_path, silent=silent)
    sent = {
        site
        for task, site, request, _ in wire.seen
        if task == "contribute" and request.get("state_bytes") and request["kind"] in ("train", "closing")
    }
    assert sent <= {"site-4"}
    for site in ("site-1", "site-2", "site-3"):
        own = safetensors.torch.load_file(tmp_path / site / MODEL)
        assert all(torch.equal(own[name], item) for name, item in result.state.model.items())


def counting(start: dict[str, torch.Tensor]) -> tuple[Phase, ServerState]:
    """A phase whose update adds the total to every floating tensor, and drops what it does not know."""

    def update(state: ServerState, totals: Any, cohort: Cohort) -> ServerState:
        assert not any(name.startswith("iterates/") for name in state.extra), "a method knows nothing of it"
        moved = {
            name: item + float(totals["x"]) if item.is_floating_point() else item + 1
            for name, item in state.model.items()
        }
        return ServerState(moved, {})

    return Phase("train", Schema(()), lambda state: {}, lambda *_: None, update), ServerState(start)  # type: ignore[arg-type,return-value]


def test_statistics_are_averaged_with_the_parameters_and_counters_are_not() -> None:
    """Over two phases a round, of which only the last one's model is of a round."""
    norm = nn.BatchNorm1d(2)
    phase, state = counting({name: item.detach().clone() for name, item in norm.state_dict().items()})
    names = {"weight", "bias", "running_mean", "running_var"}
    seen = []
    for number in (1, 2, 3):
        for wrapped in iterate_average.attach((phase, phase), names, number=number, rounds=3, last=2):
            state = advance(
                wrapped, state, {"x": torch.tensor(1.0).numpy()}, Cohort(number, {"a": 1.0}, 1.0)
            ).state
        seen.append(dict(state.model))
        assert (COUNT in state.extra) == (number == 2)
    for name in names:  # the raw models have moved by 2, 4 and 6
        assert torch.equal(seen[1][name], norm.state_dict()[name] + 4)
        assert torch.equal(seen[2][name], norm.state_dict()[name] + 5)
    assert int(seen[2]["num_batches_tracked"]) == 6


def test_what_never_moves_stays_the_same_bits() -> None:
    constant = {"w": torch.tensor([0.1, 1 / 3, 1e-30, 3e30])}
    kept: dict[str, torch.Tensor] = {}
    for _ in range(7):
        kept = iterate_average.add(kept, constant, {"w"})
    assert kept[SUM + "w"].dtype == torch.float64
    assert torch.equal(iterate_average.mean(kept, constant)["w"], constant["w"])


def test_a_job_that_keeps_the_last_model_has_the_hash_that_it_had() -> None:
    assert "average_last" not in job().model_dump()
    assert job().sha256() == job(average_last=1).sha256() != job(average_last=2).sha256()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"average_last": 4}, "average_last: Expected at most `rounds` (3), but got 4"),
        ({"average_last": 0}, "average_last"),
        ({"average_last": 2, "method": "fedproto"}, "average_last: fedproto has no global model"),
        ({"average_last": 2, "method": "fed3r", "rounds": 1}, "at most `rounds` (1)"),
    ],
)
def test_a_mean_of_what_there_is_not_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError) as caught:
        prepare({**HEART, **changes})
    assert told in str(caught.value)
