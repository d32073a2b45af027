"""The papers' tables: complete layouts, valid jobs, printed numbers, runs that are made once and kept."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tightframe.errors import RunError
from tightframe.rounds.setup import prepare

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TABLES = (
    *("mr1", "mr2", "mr4", "mr5", "mr6", "mr7", "mr8", "etf1", "etf2", "nh1"),
    *("gmv1", "gmv2", "gmv3", "gmv4", "gmv5", "gmv6", "ilc1", "ilc2"),
)
TINY = ["--rounds", "1", "--epochs", "1", "--subset", "200", "--workers", "1"]


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Without folders that this machine may have, and without t-SNE, which takes a second a run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = importlib.import_module("papers")
    measures = importlib.import_module("paper_measures")
    draw = measures.picture
    monkeypatch.setattr(measures, "picture", lambda *given, embed: draw(*given, embed=False))
    monkeypatch.setattr(found, "ROOTS", {})
    return found


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    names = ("fashion_mnist", "mnist", "svhn", "cifar10", "cifar100", "ham", "eicu")
    return dict.fromkeys(names, tmp_path)


def test_every_table_that_can_be_asked_for_has_a_printed_place_for_every_column(papers: ModuleType) -> None:
    assert tuple(papers.PRINTED) == TABLES
    for name, make in papers.PRINTED.items():
        table = make()
        assert table.name == name
        for titles in ([row.title for row in table.rows], [column.title for column in table.columns]):
            assert len(set(titles)) == len(titles) > 1
        for row in table.rows:
            assert len(row.printed) == len(table.columns), (name, row.title)
            assert any(row.printed)
            assert all(value is None or float(value) >= 0 for value in row.printed)


@pytest.mark.parametrize("size", ["cpu", "paper"])
@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_valid_job(
    papers: ModuleType, folders: dict[str, Path], name: str, size: str
) -> None:
    """With small networks in place of the papers', which take long to draw; a frame of 100 classes fits."""
    small = {"model": "small_cnn", "model_options": {"widths": [8, 104]}}
    seen, without = set(), []
    for cells in papers.cells_of(papers.TABLES[name](), size, folders, [0], {}):
        for cell in cells:
            if cell.reason:
                without.append((cell.row.title, cell.reason))
            for run in cell.runs.get(0, ()):
                values = run.job.model_dump() | (small if size == "paper" and name != "ilc1" else {})
                told = json.dumps(
                    {key: values[key] for key in values if key not in ("dataset_options", "sites")}
                )
                if told not in seen:
                    seen.add(told)
                    assert prepare(values).job.rounds == values["rounds"]
    reasons = {
        "gmv6": {(row, "not run: FeMNIST is not a data set of Tightframe") for row in _rows(papers, "gmv6")},
        "etf1": {
            (row, "not run: Tiny-ImageNet is not a data set of Tightframe") for row in _rows(papers, "etf1")
        },
        "ilc1": {
            (row, "not run: the paper's eICU table is not published; the demo runs with --scale cpu")
            for row in _rows(papers, "ilc1")
        },
    }
    expected = reasons.get(name, set()) if size == "paper" else set()
    assert set(without) == expected
    assert seen or (name, size) == ("gmv6", "paper")


def _rows(papers: ModuleType, name: str) -> list[str]:
    return [row.title for row in papers.TABLES[name]().rows]


# Copied by hand from the papers, cell by cell.
PRINTED = [
    ("mr1", "FedMR", "FMNIST P5C2", "75.51"),
    ("mr1", "FedNova", "FMNIST P10C2", "48.44"),
    ("mr1", "FedDC", "SVHN P10C3", "88.05"),
    ("mr1", "FedAvg", "CIFAR-100 IID", "72.28"),
    ("mr1", "FedProx", "FMNIST mean", "79.89"),
    ("mr2", "FedMR", "ISIC2019", "76.55"),
    ("mr2", "FedDC", "CIFAR-10 P100C3", "73.95"),
    ("mr6", "intra-class", "CIFAR-10 mean", "80.89"),
    ("mr7", "MOON", "P10C5", "744"),
    ("mr7", "FedMR", "IID", "635"),
    ("mr8", "FedNova", "FMNIST mean, with prototypes", "78.76"),
    ("mr8", "FedMR", "FMNIST mean, without", "81.03"),
    ("etf1", "FedETF", "CIFAR-10 a=0.05 Personal", "92.62"),
    ("etf1", "FedDyn", "CIFAR-100 a=0.1 General", "25.53"),
    ("etf1", "FedProto", "CIFAR-10 a=0.1 General", None),
    ("etf1", "FedProto", "Tiny-ImageNet a=0.05 Personal", "48.05"),
    ("etf2", "FedNH", "100 silos, 0.4 a round General", "42.77"),
    ("nh1", "FedNH", "Dir(1.0) PM(L)", "45.46"),
    ("nh1", "Local", "Dir(0.3) GM", None),
    ("gmv1", "SCAFFOLD/RS", "C10-100-2", "83.8"),
    ("gmv1", "FedDyn", "C10-100-2", None),
    ("gmv2", "SCAFFOLD + ETF", "C10-100-5", "86.1"),
    ("gmv4", "+ GMV", "E=5 C100-100-20", "37.2"),
    ("gmv4", "both", "E=2 C10-100-2", "79.8"),
    ("mr4", "FedMR", "P50C10", "293"),
    ("mr5", "FedMR, 80 %", "CIFAR-100 P10C10", "56.73"),
    ("gmv3", "alpha/R_warm 0.5/0.8", "E=5 C10-100-5", "84.8"),
    ("gmv5", "1.5", "C10-100-5", "83.0"),
    ("gmv6", "FedAvg_ETF", "E=2", "73.4"),
    ("ilc2", "FedSGD", "RCIFAR variance", ".809"),
    ("ilc1", "Fishr+Inter-Geo", "loss RCIFAR", "1.658"),
    ("ilc1", "Geometric", "AUROC eICU", ".575"),
    ("ilc1", "Fishr+Intra-Geo", "AUCPR CMNIST", ".836"),
    ("ilc1", "FedSGD", "accuracy eICU", ".919"),
]


@pytest.mark.parametrize(("name", "row", "column", "value"), PRINTED)
def test_printed_numbers_are_the_papers(
    papers: ModuleType, name: str, row: str, column: str, value: str | None
) -> None:
    table = papers.chosen(papers.TABLES[name](), [row], [column])
    assert table.rows[0].printed == (value,)


def test_printed_means_are_the_means_of_the_printed_cells(papers: ModuleType) -> None:
    """All but FedMR's own, which is not the mean of the cells beside it in print."""
    for row in papers.TABLES["mr1"]().rows:
        cells = [float(value) for value in row.printed[:6]]
        off = abs(sum(cells[:5]) / 5 - cells[5])
        assert (off > 0.05) == (row.title == "FedMR"), (row.title, off)


def test_a_small_scale_takes_digits_where_files_are_missing_and_the_set_where_they_are(
    papers: ModuleType, folders: dict[str, Path]
) -> None:
    table = papers.chosen(papers.TABLES["mr1"](), ["FedAvg"], ["FMNIST P5C2", "CIFAR-100 P10C30"])

    def trained(roots: dict[str, Path], size: str) -> list[Any]:
        (cells,) = papers.cells_of(table, size, roots, [0], {})
        return [
            (run.data, run.job.dataset_options.get("classes_per_silo")) for c in cells for run in c.runs[0]
        ]

    assert trained({}, "cpu") == [("digits", 2), ("digits", 3)]
    assert trained(folders, "cpu") == [("fashion_mnist", 2), ("digits", 3)]
    assert trained(folders, "paper") == [("fashion_mnist", 2), ("cifar100", 30)]
    (cells,) = papers.cells_of(table, "paper", {}, [0], {})
    assert cells[0].reason == "not run: files of Fashion-MNIST not given (--root fashion_mnist=FOLDER)"


def test_settings_are_the_papers(papers: ModuleType, folders: dict[str, Path]) -> None:
    def job(name: str, row: str, column: str, size: str = "paper") -> Any:
        table = papers.chosen(papers.TABLES[name](), [row], [column])
        return papers.cells_of(table, size, folders, [0], {})[0][0].runs[0][0].job

    found = job("gmv1", "FedAvg_ETF", "C100-100-20")
    assert (found.rounds, found.training.epochs, found.model, found.weights) == (1000, 2, "vgg11", "uniform")
    assert (len(found.sites), found.sites_per_round, found.method_options["warm_up"]) == (100, 10, 600)
    assert job("gmv1", "FedAvg_ETF", "C10-100-2", "cpu").method_options["warm_up"] == 9  # of 10
    found = job("etf2", "FedETF", "50 silos, 0.6 a round General")
    assert (found.sites_per_round, found.personalise, found.training.learning_rate) == (30, True, 0.04)
    assert job("etf2", "FedETF", "50 silos, 0.6 a round General", "cpu").sites_per_round == 6
    found = job("nh1", "FedNH", "Dir(0.3) PM(V)")
    assert (found.dataset_options["test"], found.dataset_options["alpha"]) == ("global", 0.3)
    assert job("mr2", "MOON", "CIFAR-10 P50C3").sites_per_round == 10


def test_runs_are_made_once_and_again_where_a_setting_changed(
    papers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = importlib.import_module("paper_runs")
    trained: list[Any] = []
    real = runs.federation.run_job
    monkeypatch.setattr(
        runs.federation, "run_job", lambda job, **more: trained.append(job) or real(job, **more)
    )
    out = tmp_path / "new" / "runs.json"
    asked = ["--table", "mr7", "--rows", "FedAvg", "FedMR", "--columns", "P5C2", *TINY, "--out", str(out)]
    assert papers.main([*asked[:4], "--columns", "P5C2", *TINY, "--out", str(out)]) == 0  # FedAvg alone
    assert [job.method for job in trained] == ["fedavg"]
    kept = json.loads(out.read_text())["runs"]
    assert papers.main(asked) == 0
    assert [job.method for job in trained] == ["fedavg", "fedmr"], "the row that was there is not run again"
    after = json.loads(out.read_text())["runs"]
    assert len(after) == 2 and all(after[key] == found for key, found in kept.items())
    capsys.readouterr()
    assert papers.main([*asked, "--markdown"]) == 0 and papers.main([*asked, "--seeds", "2", "--show"]) == 0
    assert len(trained) == 2, "showing runs nothing"
    shown = capsys.readouterr().out
    spread = next(iter(kept.values()))["spread"]
    assert f"| FedAvg | 1201/{spread:.2f} |" in shown
    assert papers.CPU in shown and "(1 seeds of 2)" in shown
    # Table 1 has the same run: it is not made again.
    other = ["--table", "mr1", "--rows", "FedAvg", "--columns", "FMNIST P5C2", *TINY, "--out", str(out)]
    assert papers.main(other) == 0 and len(trained) == 2
    assert f"67.29/{next(iter(kept.values()))['course'][-1] * 100:.1f}" in capsys.readouterr().out
    assert papers.main([*other, "--rounds", "2"]) == 0
    assert len(trained) == 3 and trained[-1].rounds == 2


def test_a_run_that_fails_shows_its_code_and_is_made_again_only_when_asked(
    papers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = importlib.import_module("paper_runs")
    made: list[str] = []

    def fails(job: Any, **_: Any) -> Any:
        made.append(job.method)
        raise RunError("too few silos", code="TF-501")

    monkeypatch.setattr(runs.federation, "run_job", fails)
    asked = ["--table", "gmv2", "--rows", "FedNova + ETF", "--workers", "1", "--markdown"]
    asked += ["--out", str(tmp_path / "runs.json")]
    assert papers.main(asked) == 0
    shown = capsys.readouterr().out
    assert "| method | C10-100-2 | C10-100-5 | C100-100-20 (ours: C10-100-2) |\n|---|---|---|---|\n" in shown
    assert "| FedNova + ETF | 71.5/TF-501 | 81.1/TF-501 | 47.9 |" in shown
    assert len(made) == 2
    assert papers.main(asked) == 0 and len(made) == 2
    assert papers.main([*asked, "--retry"]) == 0 and len(made) == 4


def test_what_cannot_be_asked_for_is_refused(papers: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"expected rows of mr8, \['FedProx'.*got \['FedAvg'\]"):
        papers.main(["--table", "mr8", "--rows", "FedAvg"])
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(SystemExit, match="a file of this program's runs"):
        papers.main(["--table", "mr8", "--show", "--out", str(tmp_path / "x.json")])
    for wrong in (["--root", "fashion_mnist=/no/such/folder"], ["--root", "digits=."], ["--seeds", "0"]):
        with pytest.raises(SystemExit):
            papers.main(["--table", "mr8", "--show", *wrong])


def test_color_mnist_is_made_of_the_test_images_where_there_are_no_others(
    papers: ModuleType, real_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = papers.chosen(papers.TABLES["ilc1"](), ["FedSGD"], ["loss CMNIST", "AUROC CMNIST"])
    (cells,) = papers.cells_of(table, "cpu", {"mnist": real_data / "mnist_t10k"}, [0], {"rounds": 1})
    assert cells[0].keys == cells[1].keys
    runs = importlib.import_module("paper_runs")
    store = runs.Store(tmp_path / "runs.json")
    assert runs.fill(cells, store, retry=False, log=lambda text: None) == {}
    (found,) = store.runs.values()
    assert found["partition"]["source"] == "test"
    assert 0 < found["final"]["loss"] < 10 and 0 <= found["final"]["auroc"] <= 1
    assert papers.ours(cells[0], store, {}) == f"{found['final']['loss']:.3f}"
    assert papers.ours(cells[1], store, {}) == f"{found['final']['auroc']:.3f}"


def test_methods_without_a_global_model_have_no_such_number(papers: ModuleType, tmp_path: Path) -> None:
    columns = ["CIFAR-10 a=0.1 General", "CIFAR-10 a=0.1 Personal"]
    table = papers.chosen(papers.TABLES["etf1"](), ["FedProto"], columns)
    (cells,) = papers.cells_of(table, "cpu", {}, [0], {"rounds": 1, "epochs": 1})
    runs = importlib.import_module("paper_runs")
    store = runs.Store(tmp_path / "runs.json")
    runs.fill(cells, store, retry=False, log=lambda text: None)
    (found,) = store.runs.values()
    assert papers.ours(cells[0], store, {}) == "none"
    assert papers.ours(cells[1], store, {}) == f"{100 * found['personal']['accuracy']:.1f}"


def test_a_score_is_of_the_models_that_are_a_methods_result(papers: ModuleType) -> None:
    asked = papers.chosen(papers.TABLES["etf1"](), ["FedAvg", "CCVR"], ["CIFAR-10 a=0.1 General"])
    rows = papers.cells_of(asked, "cpu", {}, [0], {})
    assert [cells[0].runs[0][0].last for cells in rows] == [5, 1], "CCVR's model is made after the rounds"


def test_runs_are_the_same_in_a_process_of_their_own(
    papers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a seed whose features are not embedded, in one process: embedding and imports take seconds."""
    runs = importlib.import_module("paper_runs")
    pool = runs.ProcessPoolExecutor
    monkeypatch.setattr(runs, "ProcessPoolExecutor", lambda _workers, **given: pool(1, **given))
    table = papers.chosen(papers.TABLES["mr7"](), ["FedAvg", "FedProx"], ["P5C2"])
    few = {"rounds": 1, "epochs": 1, "subset": 200}
    cells = [cell for row in papers.cells_of(table, "cpu", {}, [1], few) for cell in row]
    kept = []
    for workers in (1, 2):
        store = runs.Store(tmp_path / f"{workers}.json")
        assert runs.fill(cells, store, retry=False, log=lambda text: None, workers=workers) == {}
        kept.append({key: (run["course"], run["spread"]) for key, run in store.runs.items()})
    assert kept[0] == kept[1] and len(kept[0]) == 2 and all(course for course, _ in kept[0].values())


# ---------------------------------------------------------------- effects and the queue


def test_the_queue_makes_every_table_and_names_rows_that_exist(
    papers: ModuleType, folders: dict[str, Path]
) -> None:
    for size in ("cpu", "paper"):
        for step in papers.QUEUE[size]:
            table = papers.chosen(papers.TABLES[step.table](), step.rows, step.columns)
            cells = papers.cells_of(table, size, folders, papers.seeds_of(table, size, step.seeds), {})
            assert cells and any(cell.runs for row in cells for cell in row), step
    whole = {step.table for step in papers.QUEUE["cpu"] if step.rows is None and step.columns is None}
    assert whole >= set(papers.PRINTED) | {"fx_c2", "fx_mlp", "fx_ilc", "fx_nh", "fx_mr"}


def test_an_effect_is_measured_on_seeds_of_its_own_and_never_on_other_data(
    papers: ModuleType, folders: dict[str, Path]
) -> None:
    for make in papers.EFFECTS.values():
        table = make()
        assert table.first_seed >= 10 and table.rows[0].title == table.baseline
        (base, *_) = papers.cells_of(table, "cpu", folders, papers.seeds_of(table, "cpu", None), {})
        assert all(
            run.data in ("fashion_mnist", "color_mnist") for runs in base[0].runs.values() for run in runs
        )
        (base, *_) = papers.cells_of(table, "cpu", {}, [10], {})
        assert base[0].reason.startswith("not run: files of"), "digits do not stand in"


def test_the_queue_ends_in_time_and_goes_on_where_it_was(
    papers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With numbers in place of trainings: the order, the paired differences and what is kept."""
    effects, runs = importlib.import_module("paper_effects"), importlib.import_module("paper_runs")
    steps = (
        effects.Step("fx_nh", ("FedAvg", "FedNH"), seeds=2),
        effects.Step("fx_nh", ("FedAvg", "FedETF"), seeds=2),
    )
    monkeypatch.setitem(papers.QUEUE, "cpu", steps)
    monkeypatch.setattr(papers.os, "nice", lambda by: by)
    clock, made = [0.0], []

    def make(run: Any) -> Any:
        clock[0] += 1
        made.append((run.job.seed, run.job.method))
        value = {"fedavg": 0.5, "fednh": 0.6, "fedetf": 0.7}[run.job.method] + 0.01 * (
            run.job.seed - 10
        ) * len(made)
        return runs.key_of(run), {"course": [0.1, *[value] * 5], "seed": run.job.seed}

    monkeypatch.setattr(runs, "make", make)
    monkeypatch.setattr(papers.time, "monotonic", lambda: clock[0])
    out = tmp_path / "runs.json"
    asked = ["--all", "--root", f"fashion_mnist={tmp_path}", "--out", str(out)]
    assert papers.main([*asked, "--hours", str(3 / 3600)]) == 0
    assert made == [(10, "fedavg"), (10, "fednh"), (11, "fedavg")], "seed by seed, until the time is up"
    assert papers.main(asked) == 0
    assert made[3:] == [(11, "fednh"), (10, "fedetf"), (11, "fedetf")], "no run twice"
    capsys.readouterr()
    shown = ["--table", "fx_nh", "--rows", "FedAvg", "FedNH", "--seeds", "2", "--show", "--markdown"]
    assert papers.main([*shown, *asked[1:]]) == 0
    # FedAvg 0.5 and 0.53, FedNH 0.6 and 0.64: differences 0.10 and 0.11, t(1) = 12.706, half of 0.01 apart.
    assert "+10.5 [+4.1, +16.9], 2" in capsys.readouterr().out
