"""Measures and figures of the papers: by the printed formulas, and drawn from runs that are there."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import entropy
from sklearn.neighbors import NearestNeighbors

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_collapse_is_the_formula_with_a_pseudo_inverse(loaded: Any) -> None:
    measures = loaded("paper_measures")
    rng = np.random.default_rng(3)
    labels = np.repeat([0, 2, 5], [4, 7, 9])
    features = rng.normal(size=(20, 6)) + 3 * rng.normal(size=(6, 6))[labels]
    means = np.stack([features[labels == label].mean(0) for label in (0, 2, 5)])
    within = np.mean([np.cov(features[labels == label].T, bias=True) for label in (0, 2, 5)], axis=0)
    between = np.cov(means.T, bias=True)
    expected = np.trace(within @ np.linalg.pinv(between, rcond=1e-10)) / 3
    assert measures.nc1(features, labels) == pytest.approx(expected, rel=1e-8)
    centred = means - means.mean(0)
    pairs = [
        abs(centred[a] @ centred[b] / np.linalg.norm(centred[a]) / np.linalg.norm(centred[b]) + 0.5)
        for a, b in ((0, 1), (0, 2), (1, 2))
    ]
    assert measures.nc2(features, labels) == pytest.approx(np.mean(pairs), rel=1e-10)
    assert math.isnan(measures.nc1(features[:4], labels[:4]))


def test_fairness_is_variance_and_entropy_as_printed(loaded: Any) -> None:
    measures = loaded("paper_measures")
    values = [0.9, 0.7, 0.65, 0.8]
    assert measures.variance(values) == pytest.approx(1000 * np.var(values, ddof=1))
    assert measures.entropy(values) == pytest.approx(10 * entropy(values))


def test_wide_features_are_embedded_in_the_plane(loaded: Any) -> None:
    class Same(torch.nn.Module):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return x

    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
    inputs[10:] += 50
    labels = np.repeat([0, 1], 10)
    drawn = loaded("paper_measures").picture(Same(), inputs, labels, embed=True)
    points, near = np.array(drawn["points"]), NearestNeighbors(n_neighbors=2)
    places = near.fit(points).kneighbors(points, return_distance=False)[:, 1]
    assert points.shape == (20, 2) and (labels[places] == labels).all(), "neighbours stay neighbours"


@pytest.mark.parametrize("figure", ["collapse", "curves", "sensitivity", "cosines", "embedding"])
def test_every_figure_is_drawn_from_runs_and_says_which_are_missing(
    loaded: Any, tmp_path: Path, figure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing, runs = loaded("paper_figures"), loaded("paper_runs")
    out, kept = tmp_path / "a.png", tmp_path / "runs.json"
    asked = [
        figure,
        "--table",
        "fx_nh",
        "--rows",
        "FedAvg",
        "FedNH",
        "FedETF",
        "--seeds",
        "2",
        "-o",
        str(out),
    ]
    asked += ["--root", f"fashion_mnist={tmp_path}", "--runs", str(kept)]
    with pytest.raises(SystemExit, match="expected finished runs"):
        drawing.main(asked)
    store = runs.Store(kept)
    _filled(drawing, runs, store, tmp_path)
    capsys.readouterr()
    assert drawing.main(asked) == 0
    if figure != "sensitivity":
        assert "no finished run of FedETF: left out" in capsys.readouterr().err
    with Image.open(out) as picture:
        assert min(picture.size) > 100 and len(picture.convert("RGB").getcolors(1 << 20) or ()) > 20


def _filled(drawing: ModuleType, runs: ModuleType, store: Any, folder: Path) -> None:
    """Put made-up runs of two methods with two seeds into a store."""
    table = drawing.chosen(drawing.TABLES["fx_nh"](), ["FedAvg", "FedNH"], None)
    rng = np.random.default_rng(0)
    for (cell,) in drawing.cells_of(table, "cpu", {"fashion_mnist": folder}, [10, 11], {}):
        for seed, (run,) in cell.runs.items():
            shapes = [
                {"round": place, "nc1": 3.0 / place, "nc2": 0.5 / place, "cosine": 0.1 * place}
                for place in range(1, 6)
            ]
            drawn = {
                "cosines": np.corrcoef(rng.normal(size=(10, 4))).tolist(),
                "points": rng.normal(size=(40, 2)).tolist(),
                "labels": [place % 10 for place in range(40)],
            }
            course = [0.1, *rng.uniform(0.4, 0.6, 5).tolist()]
            store.put(
                run, {"seed": seed, "course": course, "losses": course, "shapes": shapes, "drawn": drawn}
            )
