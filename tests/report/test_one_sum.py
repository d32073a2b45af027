"""A model of one sum: outcome, last screen, page and `tightframe methods` say what was opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.pages import Page, values
from typer.testing import CliRunner

from tightframe import federation
from tightframe.data.image_sets import open_silos
from tightframe.federation import Result
from tightframe.methods import fedcgs, fedncm
from tightframe_app.cli import app

TITLE = "The sum that the model is made of"
WIDTH, CLASSES = 16, 10


def _run(method: str, folder: Path, **changes: Any) -> Result:
    options = {"partition": "iid", "silos": 3}
    return federation.run(
        method,
        open_silos("digits", **options),
        1,
        dataset="digits",
        dataset_options=options,
        folder=folder,
        **{"model": "random_features", "model_options": {"width": WIDTH}, **changes},
    )


@pytest.mark.whole
def test_a_run_says_what_its_sum_opened(tmp_path: Path) -> None:
    result = _run("fed3r", tmp_path)
    outcome = values(tmp_path / "server" / "outcome.json")["one_sum"]
    products, sums, counts = outcome["numbers"].values()
    assert (products, sums, counts) == (WIDTH * (WIDTH + 1) // 2, CLASSES * WIDTH, CLASSES)
    assert not outcome["noisy"] and "W = B (G + lambda I)^-1" in outcome["follows"]
    page = Page.of(tmp_path / "server")
    (table,) = page.tables(TITLE)
    assert [row["numbers"] for row in table] == [f"{count:,}" for count in (products, sums, counts)]
    assert f"Nothing was trained: one exchange opened these {products + sums + counts} numbers" in page.text
    assert outcome["follows"] in page.text
    assert "The method fed3r gave the model random_features its head from one sum" in page.text
    screen = result.outcome.screen()
    assert f"Opened, once: {products} of G, products of features" in screen and outcome["follows"] in screen


def test_a_trained_model_says_nothing_of_it(tmp_path: Path) -> None:
    result = _run("fedavg", tmp_path)
    assert "one_sum" not in values(tmp_path / "server" / "outcome.json")
    assert TITLE not in Page.of(tmp_path / "server").titles()
    assert "Opened, once" not in result.outcome.screen()


@pytest.mark.parametrize(("name", "method"), [("fedcgs", fedcgs), ("fedncm", fedncm)])
def test_the_command_tells_sizes_and_what_follows(name: str, method: Any) -> None:
    told = CliRunner().invoke(app, ["methods", name], env={"COLUMNS": "200"}).output
    assert method.METHOD.one_sum.follows in told
    assert ("8,256 of G" in told) == (name == "fedcgs"), "128 x 129 / 2 products, of those that sum any"
    assert "1,024 of B, class sums of features, C x d; 8 of n" in told
    assert "opens, as one sum" not in CliRunner().invoke(app, ["methods", "fedavg"]).output
