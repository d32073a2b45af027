"""``tightframe predict`` and ``tightframe export``: use a trained model here or in other programs."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightframe.errors import ModelError
from tightframe_app.screens import lines, shown

if TYPE_CHECKING:
    from tightframe.data.table import TableSite
    from tightframe.inference.model import TrainedModel

SHOWN = 200
EVERY = 2.0
out = lines()
err = lines(stderr=True)

_Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_DIR",
        help="Results of a run's server or of a silo, or a model file in them (personal_model.safetensors).",
    ),
]


def predict(
    model_dir: _Model,
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Pictures (PNG, JPEG, TIFF, DICOM) or folders with them; or one CSV file."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="CSV file to write.")],
    operating_point: Annotated[
        str | None,
        typer.Option(help="CLASS=P: answer this class from probability P on, else the best other."),
    ] = None,
    originals: Annotated[
        bool,
        typer.Option(help="Pictures come as the camera made them: prepare them like training records."),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Column of a table that names a row in the output.")
    ] = None,
    modality: Annotated[str | None, typer.Option(help="The only modality that DICOM files may have.")] = None,
    site_config: Annotated[
        Path | None,
        typer.Option(help="A table has the names, codes and units of the entry in this configuration."),
    ] = None,
    site: Annotated[str | None, typer.Option(help="The site, where the configuration has several.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    force: Annotated[bool, typer.Option(help="Replace the output.")] = False,
) -> None:
    """Write a trained model's answer for each input, with the probability of each class and the model's hash.

    The form of all inputs is checked first. Inputs that cannot be read are listed at the end, with codes,
    and then the exit code is 1; all others are in the output. No medical device: for research only.
    """
    from tightframe.files import new_file
    from tightframe.inference import inputs as files
    from tightframe.inference.model import load_model
    from tightframe.inference.predictions import OperatingPoint, class_codes, header, line, predictions
    from tightframe.results.files import BEST, MODEL

    if output.exists() and not force:
        raise FileExistsError(f"Expected {output} to be free, but it is there: give --force to replace it.")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"Expected the folder {output.parent} for the output, but there is none.")
    try:
        model = load_model(model_dir, device=device)
    except RuntimeError as error:
        raise ModelError(f"Expected a device that torch has, but {device!r} gives: {error}.") from None
    point = (
        None
        if operating_point is None
        else OperatingPoint.parsed(operating_point, model.class_names, class_codes(model))
    )
    entry = None if site_config is None else _entry(model, site_config, site)
    records = files.find(model, inputs, originals=originals, name_column=name, modality=modality, entry=entry)
    kind = "findings" if model.findings else "classes"
    what = f"{model.setup.method.title}, {kind} {', '.join(model.class_names)}"
    err.print(f"model {model.hash[:12]} ({model.origin}): {what}")
    best = model.path.with_name(BEST)
    if model.path.name == MODEL and model.best_round not in (None, model.setup.job.rounds) and best.is_file():
        err.print(f"The best by validation was round {model.best_round}'s; it answers if you name {best}")
    if model.absent_classes:
        lacks = ", ".join(model.absent_classes)
        err.print(f"NOT IN THE MODEL: {lacks}; it never answers that, whatever the record (see its report)")
    _say_one_answer(model)
    if model.synthetic:
        err.print("SYNTHETIC TWIN: the model was trained on generated records; its answers mean nothing")
    last = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            err.print(f"{done} of {of}")

    partial, count, names = output.with_name(f".{output.name}.{os.getpid()}"), 0, Counter[str]()
    try:
        with new_file(partial) as stream:  # answers about patients
            stream.write(header(model, point))
            for prediction in predictions(model, records, point, progress):
                stream.write(line(model, prediction, point))
                count += 1
                names[prediction.name] += 1
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    out.print(f"{output}: {count} of {len(records)} inputs")
    if repeated := [f"{name!r} {times} times" for name, times in names.items() if times > 1]:
        rest = f" and {len(repeated) - SHOWN} more" if len(repeated) > SHOWN else ""
        err.print(shown(f"names that are there more than once: {', '.join(repeated[:SHOWN])}{rest}"))
    if records.left:
        err.print(
            f"{records.left} other files in these folders are no pictures by their names, and were left"
        )
    if records.problems:
        err.print(f"{len(records.problems)} inputs could not be judged:")
        for problem in records.problems[:SHOWN]:
            err.print(shown(f"  {problem}"))
        if (more := len(records.problems) - SHOWN) > 0:
            err.print(f"  and {more} more")
        raise typer.Exit(1)


def _say_one_answer(model: TrainedModel) -> None:
    """Say of a model which gives one answer that it does."""
    from tightframe.results.words import one_answer

    if (text := one_answer(model.one_answer)) is not None:
        err.print(shown(f"ONE ANSWER: on the test records {text}"))


def _entry(model: TrainedModel, config: Path, site: str | None) -> TableSite:
    """Return a site's entry for a table to predict on.

    Raises:
        ModelError: TF-823 for a model of other data, or without a choice among several sites.
        SiteConfigError: if there is no such site or entry.
    """
    from tightframe.data.table.encoding import check_mapping
    from tightframe_app.data.contracts import entries

    dataset = model.setup.dataset
    if dataset.name != "table":
        raise ModelError(
            f"--site-config is for own tables, but the model is of {dataset.title}.", code="TF-823"
        )
    contract = dataset.options.model_validate(model.setup.job.dataset_options).contract  # type: ignore[attr-defined]
    matching = entries(config, site, contract)
    if len(matching) != 1:
        names = ", ".join(name for name, _ in matching)
        raise ModelError(f"Expected one site, but {config} has {names}: name it with --site.", code="TF-823")
    check_mapping(contract, matching[0][1])
    return matching[0][1]


def export(
    model_dir: _Model,
    form: Annotated[str, typer.Option("--format", help="onnx, torchscript or monai-bundle.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; for a bundle the folder.")],
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference of a probability from the model's.")
    ] = 1e-5,
) -> None:
    """Write a trained model as ONNX, TorchScript or a MONAI bundle, and check that it gives the same answers.

    The export is run on generated records and compared with the model; one that differs is not written. It
    takes records as they are after the evaluation's transforms, and gives probabilities. Classes, card and
    the model's hash are inside.
    """
    from tightframe.inference.exports import FORMATS
    from tightframe.inference.exports import export as written
    from tightframe.inference.model import load_model

    target = next((item for item in FORMATS if item == form), None)
    if target is None:
        raise typer.BadParameter(f"expected one of {list(FORMATS)}, got {form!r}", param_hint="--format")
    if output.exists():
        raise FileExistsError(f"Expected {output} to be free, but it is there: name another.")
    model = load_model(model_dir)
    _say_one_answer(model)
    if model.synthetic:
        err.print("SYNTHETIC TWIN: the model was trained on generated records; its answers mean nothing")
    result = written(model, target, output, tolerance=tolerance)
    out.print(f"{result.path}: model {model.hash}")
    out.print(f"largest difference of a probability on generated records: {result.difference:.2g}")
