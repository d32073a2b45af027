"""The server's page: every number in it against the files, read without the report's own reader."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import runs
from tests.support.browser import Browser
from tests.support.pages import SVG, Loads, Page, lines, said, values
from tests.support.screens import chart_problems, contrast_problems

from tightframe.errors import RunError
from tightframe.report.writing import write
from tightframe.rounds.riders import noisy_evaluation
from tightframe.rounds.sums.simulated_identity import simulated_anchor
from tightframe.securesum.transcript import verify

Copied = Callable[[str], Path]


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page.of(run / "server")


def three(value: float | None) -> str:
    return "missing" if value is None else f"{value:.3f}"


def test_a_run_leaves_the_page_and_it_can_be_made_again(run: Path, tmp_path: Path) -> None:
    made = (run / "server" / "report.html").read_bytes()
    assert write(run / "server", tmp_path / "again.html").read_bytes() == made


def test_the_page_loads_nothing_and_runs_nothing(run: Path, early: Path) -> None:
    for folder in (run / "server", early / "server", run / "site-1"):
        source = Page.of(folder).source
        found = Loads(source).elements
        assert len(found) > 100
        assert {tag for tag, _ in found} & {
            "script",
            "link",
            "img",
            "iframe",
            "object",
            "embed",
            "base",
        } == set()
        for _, attributes in found:
            assert not set(attributes) & {"src", "srcset", "action", "xlink:href", "data", "poster", "style"}
            assert (attributes.get("href") or "#").startswith("#"), "links stay on the page"
            assert not [name for name in attributes if name.startswith("on")]
        assert "@import" not in source and "url(" not in source
        assert set(re.findall(r"https?://[^\"'<\s]*", source)) == {"http://www.w3.org/2000/svg"}, (
            "a name, no load"
        )
        policy = [of["content"] for tag, of in found if of.get("http-equiv") == "Content-Security-Policy"]
        style = source.partition("<style>")[2].partition("</style>")[0]
        allowed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        assert policy == [
            f"default-src 'none'; style-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
        ]


def test_it_can_be_read_on_a_desk_and_on_a_phone_in_light_and_dark(run: Path, browser: Browser) -> None:
    for party in ("server", "site-1"):
        assert chart_problems(browser, (run / party / "report.html").as_uri()) == []
        assert contrast_problems(browser) == []


def test_the_contents_list_names_every_section_in_order(run: Path, early: Path) -> None:
    for folder in (run / "server", early / "server", run / "site-1"):
        page = Page.of(folder)
        (nav,) = page.tree.iter("nav")
        links = [(said(link), (link.get("href") or "").removeprefix("#")) for link in nav.iter("a")]
        sections = [(item.findtext("h2"), item.get("id")) for item in page.tree.iter("section")]
        assert links == sections and len(links) > 3
        places = [item.get("id") for item in page.tree.iter() if item.get("id")]
        assert len(places) == len(set(places))


def test_pictures_say_what_they_show_and_have_no_number_that_is_none(run: Path, page: Page) -> None:
    read = values(run / "server" / "outcome.json")["evaluation"]["test"]["reading"]
    assert len(page.pictures()) == 8 + 2 * len(read)
    for picture in page.pictures():
        assert picture.findtext(f"{SVG}title") and picture.findtext(f"{SVG}desc")
        assert picture.get("role") == "img"
        for element in picture.iter():
            for name in ("x", "y", "width", "height", "x1", "x2", "y1", "y2"):
                float(element.get(name, "0"))
            assert "nan" not in " ".join(element.attrib.values())


def test_the_outcome_in_words_has_its_numbers(run: Path, page: Page) -> None:
    outcome = values(run / "server" / "outcome.json")
    test, validation = outcome["evaluation"]["test"], outcome["evaluation"]["validation"]
    for part in (
        "Trained.",
        "Synthetic records.",
        "A simulation",
        "The method fedmr trained the model small_cnn over 4 silos with secure sums. Data: SYNTHETIC TWIN",
        f"ended as planned, with 3 of 3 rounds, after {outcome['seconds']:.0f} s.",
        f"On the {test['records']} test records of all silos the final model has balanced accuracy "
        f"{test['balanced_accuracy']:.3f} and AUROC {test['auroc']:.3f}; on the {validation['records']} "
        f"validation records, {validation['balanced_accuracy']:.3f} and {validation['auroc']:.3f}.",
    ):
        assert part in page.text


def test_metrics_of_the_final_model(run: Path, page: Page) -> None:
    evaluation = values(run / "server" / "outcome.json")["evaluation"]
    (table,) = page.tables("The final model")
    for row, fold in zip(table, ("validation", "test"), strict=True):
        found = evaluation[fold]
        assert row["records"] == fold and row["number"] == str(found["records"])
        for name, key in (("AUROC", "auroc"), ("average precision", "average_precision"), ("loss", "loss")):
            assert row[name] == three(found[key])
        assert row["balanced accuracy"] == three(found["balanced_accuracy"])
        assert row["accuracy"] == three(found["accuracy"])


def test_the_course_of_training_marks_what_is_missing(run: Path, page: Page) -> None:
    rows = [row for row in lines(run / "server" / "metrics.jsonl") if row["kind"] in ("start", "train")]
    (table,) = page.tables("Course of training")
    assert [row["after round"] for row in table] == ["0", "1", "2", "3"]
    for shown, row in zip(table, rows, strict=True):
        evaluation = row["evaluation"]
        if row["round"]:
            assert shown["training loss"] == three(row["training"].get("loss"))
        for fold in ("validation", "test"):
            metrics = evaluation[fold] if evaluation else {}
            assert shown[f"{fold} loss"] == three(metrics.get("loss"))
            assert shown[f"{fold} balanced accuracy"] == three(metrics.get("balanced_accuracy"))
        assert shown["counted by"] == ("all silos" if evaluation else "missing")
    # Round 1's model was to be counted in round 2, where a silo was silent.
    assert table[1]["test loss"] == "missing" and table[2]["training loss"] == "missing"
    picture = page.picture("Balanced accuracy by round")
    points = [said(item) for item in picture.iter(f"{SVG}path") if said(item).startswith("test, ")]
    assert [point.partition(":")[0] for point in points] == ["test, 0", "test, 2", "test, 3"]
    assert len(picture.findall(f"{SVG}polyline")) == 2, (
        "one piece each, of rounds 2 and 3: gaps are not bridged"
    )


def test_models_that_the_job_does_not_evaluate_are_no_gap(copied: Copied) -> None:
    folder = copied("server")
    outcome = values(folder / "outcome.json")
    outcome["job"]["evaluation"]["models"] = 2
    (folder / "outcome.json").write_text(json.dumps(outcome))
    rows = [
        row | {"evaluation": row["evaluation"] if row["round"] in (0, 3) else None}
        for row in lines(folder / "metrics.jsonl")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(folder)
    page = Page.of(folder)
    (table,) = page.tables("Course of training")
    assert [row["counted by"] for row in table] == ["all silos", "-", "-", "all silos"]
    assert [row["test loss"] == "-" for row in table] == [False, True, True, False]
    pieces = page.picture("Balanced accuracy by round").findall(f"{SVG}polyline")
    assert [len((piece.get("points") or "").split()) for piece in pieces] == [2, 2], "each over all rounds"


def test_recall_and_confusion(run: Path, page: Page) -> None:
    test = values(run / "server" / "outcome.json")["evaluation"]["test"]
    (table,) = page.tables("Recall by class")
    assert {row["class"]: row["test records"] for row in table} == {
        name: str(count) for name, count in test["class_records"].items()
    }
    for row in table:
        recall = test["recall"][row["class"]]
        assert row["recall"] == ("no records" if recall is None else f"{recall:.3f}")
    notes = [said(item) for item in page.picture("Recall by class").iter(f"{SVG}text")]
    for count in test["class_records"].values():
        assert f"n = {count}" in notes

    matrix = test["confusion"]
    assert [sum(row) for row in matrix] == list(test["class_records"].values())
    hits = sum(matrix[i][i] for i in range(len(matrix)))
    assert hits / sum(map(sum, matrix)) == pytest.approx(test["accuracy"], abs=1e-12)
    names = list(test["recall"])
    tips = {said(item) for item in page.picture("Confusion matrix").iter(f"{SVG}title")}
    expected = {
        f"{names[i]} taken for {names[j]}: {count} of {sum(row)}"
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if count
    }
    assert expected <= tips and len(tips & expected) == sum(count > 0 for row in matrix for count in row)


def test_who_took_part(run: Path, page: Page) -> None:
    rows = [row for row in lines(run / "server" / "metrics.jsonl") if row["silos"]]
    counted, missing = page.tables("Silos")
    for row in counted:
        silo = row["silo"]
        assert row["answered"] == str(sum(silo in item["silos"] for item in rows))
        assert row["late"] == str(sum(item["dropped"].get(silo) == "TF-502" for item in rows))
        weight = values(run / "server" / "model.json")["public_weights"][silo]
        assert row["public weight"] == f"{weight:g}"
    assert missing == [{"silo": "site-3", "missing from": "round 2", "code": "TF-502", "meaning": "late"}]
    tips = [said(item) for item in page.picture("Silos by exchange").iter(f"{SVG}title")]
    assert "site-3, round 2: TF-502 (late)" in tips and "site-3, round 3: answered" in tips
    assert sum(tip.endswith("answered") for tip in tips) == 4 * 5 - 1


def test_protocol_facts_are_those_of_the_verified_transcript(run: Path, page: Page) -> None:
    raw = (run / "server" / "transcript.jsonl").read_bytes().splitlines(keepends=True)
    report = verify(raw, simulated_anchor("a-run", production=False))
    signed, sums = page.tables("Protocol")
    (epoch,) = report.epochs
    assert signed[0]["threshold"] == str(epoch.params.threshold) == "3"
    assert signed[0]["server assumed to be"] == "malicious (any deviation)"
    assert signed[0]["silos"] == str(len(epoch.params.roster)) and signed[0]["colluders assumed"] == "1"
    assert [row["round/phase/try"] for row in sums] == [str(item.sum_id) for item in report.sums]
    for row, item in zip(sums, report.sums, strict=True):
        assert row["survivors"] == f"{4 - len(item.missing)} of 4"
        assert row["missing"] == (", ".join(item.missing) or "nobody") and row["result"] == "opened"
        assert row["threshold"] == "3"
    assert page.facts("Protocol")["sums"] == f"{len(report.opened)} opened, 0 not opened"
    proof = page.facts("Hashes and versions")
    assert proof["transcript, last line"] == report.head == hashlib.sha256(raw[-1].rstrip()).hexdigest()


def test_hashes_versions_and_the_command(run: Path, page: Page) -> None:
    model = hashlib.sha256((run / "server" / "model.safetensors").read_bytes()).hexdigest()
    card = values(run / "server" / "model.json")
    found = page.facts("Hashes and versions")
    assert found["model.safetensors"] == model and found["job"] == card["job_sha256"]
    for name, version in card["versions"].items():
        assert found[name] == version
    command = [said(item) for item in page.section("Hashes and versions").iter("pre")]
    assert command == ["tightframe transcript verify transcript.jsonl --root simulated_root.pem"]


def test_configuration_time_and_traffic(run: Path, page: Page) -> None:
    job = values(run / "server" / "model.json")["job"]
    (table,) = page.tables("Configuration")
    found = {row["key"]: row["value"] for row in table}
    assert found["rounds"] == "3" and found["method"] == '"fedmr"'.strip('"')
    assert found["training.learning_rate"] == "0.05" and found["sites"] == "site-1, site-2, site-3, site-4"
    assert found["model_options.widths"] == "8, 8, 8" and found["privacy"] == "none"
    assert {key.partition(".")[0] for key in found} == set(job)
    # What the job of the run leaves out, as the method's page and the model's table have it.
    assert "intra_form" not in job["method_options"] and found["method_options.intra_form"] == "correlation"
    assert found["method_options.lite_m"] == "not set" and found["model_options.dropout"] == "0.0"
    assert found["prototype_sites"] == found["sites_per_round"] == "all"
    rows = [row for row in lines(run / "server" / "metrics.jsonl") if row["bytes_up"]]
    (table,) = page.tables("Time and traffic")
    for shown, row in zip(table, rows, strict=False):
        assert shown["seconds"] == f"{row['seconds']:.1f}"
        assert shown["MB to server"] == f"{row['bytes_up'] / 1e6:.2f}"
        assert shown["MB to silos"] == f"{row['bytes_down'] / 1e6:.2f}"
    assert table[-1]["exchange"] == "together" and len(table) == len(rows) + 1
    assert table[-1]["MB to server"] == f"{sum(row['bytes_up'] for row in rows) / 1e6:.2f}"


def test_nothing_of_a_silo_s_own_results_is_in_it(run: Path, page: Page) -> None:
    for silo in ("site-1", "site-2", "site-3", "site-4"):
        report = values(run / silo / "local_report.json")
        assert report["personal"]["model_sha256"] not in page.source and report["data"] not in page.source
    assert "local-only" not in page.source and "epsilon spent" not in page.source


def test_a_run_that_failed(early: Path) -> None:
    page = Page.of(early / "server")
    reason = values(early / "server" / "outcome.json")["reason"]
    assert "Not trained." in page.text and reason in page.text and "TF-501" in reason
    assert "The run ended early: 0 of 2 rounds" in page.text
    assert "Its test metrics are missing: there is no final model." in page.text
    assert "Confusion matrix" not in page.titles() and "Recall by class" not in page.titles()
    *_, missing = page.tables("Silos")
    assert [(row["silo"], row["code"]) for row in missing] == [("site-1", "TF-502"), ("site-3", "TF-502")]
    *_, sums = page.tables("Protocol")
    assert sums[0]["result"] == "not opened: TF-501" and sums[0]["survivors"] == "not settled"
    assert page.facts("Hashes and versions")["model.safetensors"] == "missing"
    (table,) = page.tables("Configuration")
    assert {"key": "rounds", "value": "2"} in table, "without a model's card, too"


def test_a_run_that_ended_in_enrolment_counts_nobody_as_enrolled(early: Path, tmp_path: Path) -> None:
    assert "silos enrolled" in Page.of(early / "server").text
    with pytest.raises(RunError):
        runs.run(runs.job(), tmp_path, silent=lambda task, site, request: True)
    page = Page.of(tmp_path / "server")
    assert "too few silos in enrolment" in page.text and "no silo was enrolled" in page.text
    assert "silos enrolled" not in page.text
    (table,) = page.tables("Silos")
    assert table == [{"silo": site, "code": "TF-502", "meaning": "late"} for site in runs.FOUR]
    folder = tmp_path / "server"
    outcome = values(folder / "outcome.json")
    told = "epsilon_cap: asked 8, required at most 4"
    outcome |= {"not_enrolled": {"site-2": "TF-614"}, "not_enrolled_rules": {"site-2": [told]}}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    write(folder)
    (table,) = Page.of(folder).tables("Silos")
    assert [row["silo"] for row in table] == runs.FOUR
    assert table[1]["code"] == "TF-614" and table[1]["meaning"] == f"below the site's policy; {told}"
    assert {row["code"] for row in table} == {"TF-614", "-"}


def test_silos_own_models_are_nowhere_called_a_final_model(run: Path, copied: Copied) -> None:
    """The same run as one of a method without a global model tells it."""
    assert "The silos' own models" not in Page.of(run / "server").text
    folder = copied("server")
    rows = lines(folder / "metrics.jsonl")
    scored = [row for row in rows if row["evaluation"]]
    for row in scored[:-1]:
        row["evaluation"] = None
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = values(folder / "outcome.json") | {"own_models": True}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    write(folder)
    page = Page.of(folder)
    assert "final model" not in page.text and "each round's model" not in page.text
    assert "The silos' own models" in page.titles() and "The final model" not in page.titles()
    assert "that the silos' own models find, all silos" in page.text
    assert "Test records of the silos' own models, all silos: rows" in page.text
    assert "of the silos' own models, which are evaluated after the last round only." in page.text
    assert "here each silo counts once, and there each record" in said(page.section("Personal models"))
    course = {row["test AUROC"] for row in page.tables("Course of training")[0][:-1]}
    assert course == {"-"}, "a model that was not to be evaluated is not missing"
    assert len(scored) > 1, "there was something to leave out"


def test_the_loss_of_a_run_without_training_is_not_missing(copied: Copied) -> None:
    """Models of one sum train nothing."""
    folder = copied("server")
    rows = [row | {"training": {}} for row in lines(folder / "metrics.jsonl")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(folder)
    course = Page.of(folder).tables("Course of training")[0]
    assert {row["training loss"] for row in course} == {"-"}


def test_a_model_of_an_earlier_run_is_not_called_this_one_s(copied: Copied) -> None:
    folder = copied("server")
    outcome = values(folder / "outcome.json") | {
        "trained": False,
        "reason": "TF-504: aborted",
        "evaluation": None,
    }
    (folder / "outcome.json").write_text(json.dumps(outcome))
    write(folder)
    assert Page.of(folder).facts("Hashes and versions")["model.safetensors"] == "missing"


HOSTILE = "<script>alert(1)</script>"


def _with(value: Any, old: str, new: str) -> Any:
    """Values with a name replaced in keys and texts."""
    if isinstance(value, dict):
        return {_with(key, old, new): _with(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_with(item, old, new) for item in value]
    return value.replace(old, new) if isinstance(value, str) else value


@pytest.mark.parametrize(
    "name", [HOSTILE, '"><img src=x onerror=alert(1)>', "'; }</style><b>", "a\u202eb\x00c"]
)
def test_names_in_files_stay_names(copied: Copied, name: str) -> None:
    folder = copied("server")
    for path in (folder / "outcome.json", folder / "model.json", folder / "metrics.jsonl"):
        found = (
            [_with(_with(item, "NV", name), "site-3", name) for item in lines(path)]
            if (path.suffix == ".jsonl")
            else [_with(_with(values(path), "NV", name), "site-3", name) | {"job_name": name}]
        )
        path.write_text("\n".join(json.dumps(item) for item in found))
    write(folder)
    page = Page.of(folder)
    tags = {tag for tag, _ in Loads(page.source).elements}
    assert tags & {"script", "img", "b"} == {"b"}, "of these only the page's own <b>"
    shown = "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in name)
    assert page.tree.findtext("body/main/h1") == shown
    assert shown in [row["class"] for row in page.tables("Recall by class")[0]]
    assert shown in [row["silo"] for row in page.tables("Silos")[0]]


def test_differential_privacy_and_what_was_spent(copied: Copied) -> None:
    folder = copied("server")
    promise = {"epsilon": 6.0, "delta": 1e-5, "neighbours": "record"}
    outcome = values(folder / "outcome.json") | {"privacy": promise, "evaluation": None, "evaluated_by": []}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    write(folder)
    page = Page.of(folder)
    assert "under differential privacy they stay at the silos" in page.text
    assert "epsilon 6.0 at delta 1e-05, for one record more or less" in page.text
    assert "The exact number stays at each silo" in page.text

    rows = lines(folder / "metrics.jsonl")
    for row in rows:
        if row["kind"] == "train":
            row["privacy"] = {
                "round": row["round"],
                "promised": 6.0,
                "delta": 1e-5,
                "range": [0.5 * row["round"], 1.25 * row["round"]],
                "histogram": [
                    {"above": 1.0, "up_to": 1.5, "silos": 3},
                    {"above": 4.0, "up_to": 6.0, "silos": 1},
                ],
                "shown": {"site-2": 1.125 * row["round"]},
            }
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    write(folder)
    page = Page.of(folder)
    (table,) = page.tables("Privacy")
    assert [row["epsilon of the silos"] for row in table] == [
        "0.5 to 1.25",
        "1 to 2.5",
        "1.5 to 3.75",
    ]
    assert table[2]["silos that show theirs"] == "site-2 3.375" and table[0]["promised"] == "6"
    assert table[0]["how many silos"] == "3 up to 1.5, 1 up to 6" and table[0]["delta"] == "1e-05"
    (picture,) = [
        item for item in page.pictures() if item.findtext(f"{SVG}title") == "Epsilon spent by round"
    ]
    assert {"reported at most", "reported at least", "promised"} <= {
        item.text for item in picture.iter(f"{SVG}text")
    }


def test_silos_that_tell_nothing_of_epsilon_are_counted(copied: Copied) -> None:
    folder = copied("server")
    outcome = values(folder / "outcome.json") | {"privacy": {"epsilon": 6.0}}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    rows = lines(folder / "metrics.jsonl")
    told = {"round": 1, "promised": 6.0, "delta": 1e-5, "range": [1.0, 2.0], "untold": 3, "shown": {}}
    train = [row for row in rows if row["kind"] == "train"]
    train[0]["privacy"] = told | {"histogram": [{"above": 1.0, "up_to": 2.0, "silos": 1}]}
    train[1]["privacy"] = told | {"histogram": [], "range": None, "untold": 4}
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    write(folder)
    page = Page.of(folder)
    (table,) = page.tables("Privacy")
    assert [row["how many silos"] for row in table] == ["1 up to 2, 3 reported nothing", "4 reported nothing"]
    assert "Some silos report nothing, and may have spent all of it." in page.text
    assert "of any silo" not in page.text


def test_noisy_metrics_are_called_noisy(copied: Copied) -> None:
    folder = copied("server")
    outcome = values(folder / "outcome.json")
    test = outcome["evaluation"]["test"]
    classes = list(test["recall"])
    del test["confusion"]
    test |= {"noisy": True, "noise_deviation": 11.25, "loss": None, "records": 0}
    test["recall"][classes[0]], test["class_records"][classes[0]] = None, 0
    rows = lines(folder / "metrics.jsonl")
    for row in rows:
        if row["evaluation"]:
            row["evaluation"] = outcome["evaluation"]
    (folder / "outcome.json").write_text(json.dumps(outcome))
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    write(folder)
    page = Page.of(folder)
    assert "Noisy metrics." in page.text and "11.2 records (standard deviation)" in page.text
    assert "On about 0 (noisy) test records" in page.text and "test records counted" not in page.text
    (table,) = page.tables("Recall by class")
    # A noisy count that was cut at zero says nothing of there being records.
    assert table[0] == {"class": classes[0], "recall": "too few to show", "test records (noisy)": "0"}
    assert "no records" not in page.text


def test_every_noisy_figure_has_its_interval_and_its_classes(copied: Copied) -> None:
    folder = copied("server")
    outcome = values(folder / "outcome.json")
    names = list(outcome["evaluation"]["test"]["recall"])
    confusion = np.array([[400.0, 300.0], [90.0, 100.0]])
    fold = noisy_evaluation._fold(confusion, np.full((2, 2, 8), 50.0), names[:2], 9.0, 2.0)
    outcome["evaluation"] = {"test": fold.as_json(), "validation": fold.as_json()}
    rows = lines(folder / "metrics.jsonl")
    for row in rows:
        row["evaluation"] = outcome["evaluation"] if row["evaluation"] else None
    (folder / "outcome.json").write_text(json.dumps(outcome))
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    write(folder)
    page = Page.of(folder)
    brackets = r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]"
    (final,) = page.tables("The final model")
    for row in final:
        assert re.fullmatch(brackets + ", 2 of 2 classes", row["balanced accuracy"])
        assert re.fullmatch(brackets, row["accuracy"])
        assert re.fullmatch(brackets + ", 2 of 2 classes", row["AUROC"])
        assert re.fullmatch(r"890 \[\d+, \d+\]", row["number"])
    (course,) = page.tables("Course of training")
    told = [row for row in course if row["test balanced accuracy"] != "missing"]
    assert told and all(re.search(brackets, row["test balanced accuracy"]) for row in told)
    (recalls,) = page.tables("Recall by class")
    assert all(re.fullmatch(brackets, row["recall"]) for row in recalls)
    assert re.search("balanced accuracy " + brackets + ", 2 of 2 classes and AUROC " + brackets, page.text)
    assert len(page.picture("Balanced accuracy by round").findall(f".//{SVG}path")) >= 3


def test_a_lost_silo_and_a_model_with_one_answer_are_told_before_all_else(copied: Copied) -> None:
    folder = copied("server")
    outcome = values(folder / "outcome.json")
    lost = {"site-4": {"kind": "train", "round": 2, "at": "2026-11-22T21:42:10Z", "code": "TF-502"}}
    told = {"status": "trained, not measured", "measured": False, "lost": lost, "notes": ["first", "second"]}
    answer = {"class": "NV", "share": 1.0, "interval": None, "certain": True}
    outcome["evaluation"]["test"]["one_answer"] = answer
    (folder / "outcome.json").write_text(json.dumps(outcome | told))
    write(folder)
    page = Page.of(folder)
    notices = [item for item in page.tree.iter("div") if (item.get("class") or "").startswith("said")]
    assert [said(part) for part in notices[0]] == ["Trained, not measured.", "first", "second"]
    assert notices[0].get("class") == "said warn" and not [
        n for n in notices if "good" in str(n.get("class"))
    ]
    assert "finished 3 of 3 rounds, the last of them without site-4, after" in page.text
    assert "ended as planned" not in page.text and "3 of 4 silos there at the end" in page.text
    assert "One answer. On the test records the model gives one answer: NV, for all records." in page.text


def test_answers_that_contributed_nothing_are_counted(copied: Copied) -> None:
    """Their silos are in the sum, and so are missing nowhere."""
    folder = copied("server")
    rows = lines(folder / "metrics.jsonl")
    (trained,) = [row for row in rows if (row["kind"], row["round"]) == ("train", 1)]
    trained["counts"] = {"failed_silos": 2}
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    write(folder)
    after = Page.of(folder).text.partition("Answers that contributed nothing")[2]
    assert re.search(r"exchange\s+silos\s+round 1\s+2\s", after), after[:300]


def test_plain_sums_have_no_transcript(copied: Copied) -> None:
    folder = copied("server")
    (folder / "transcript.jsonl").unlink()
    outcome = values(folder / "outcome.json") | {"summation": "plain", "sums": "plain"}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    write(folder)
    page = Page.of(folder)
    assert page.facts("Protocol") == {"sums": "plain", "silos that a sum needs": "3"}
    assert not list(page.section("Hashes and versions").iter("pre"))


def test_results_of_an_earlier_version_are_reported_as_far_as_they_go(copied: Copied) -> None:
    """Without the matrix, the job and the versions in ``outcome.json``."""
    folder = copied("server")
    outcome = values(folder / "outcome.json")
    for key in ("job", "job_sha256", "versions", "data"):
        del outcome[key]
    for fold in outcome["evaluation"].values():
        del fold["confusion"]
    (folder / "outcome.json").write_text(json.dumps(outcome))
    write(folder)
    page = Page.of(folder)
    assert "Recall by class" in page.titles() and "Confusion matrix" not in page.titles()
    assert "The results do not say what the job was." in page.text
