"""Export of a trained model for other programs: ONNX, TorchScript, or a bundle of MONAI.

An export maps records, after the evaluation's transforms, to probabilities. It is run by its target program
on generated records and compared with the model; one that differs by more than a tolerance is deleted. Card,
classes and the model's hash are inside.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tightframe import __version__
from tightframe.data.contract import Contract
from tightframe.data.forms import RecordForm
from tightframe.data.images.contract import PictureContract
from tightframe.errors import ModelError
from tightframe.inference.model import TrainedModel
from tightframe.learning import outputs
from tightframe.models.frozen import unfrozen
from tightframe.results.model_card import Card

Format = Literal["onnx", "torchscript", "monai-bundle"]
FORMATS: tuple[Format, ...] = ("onnx", "torchscript", "monai-bundle")
TOLERANCE = 1e-5
RECORD, PROBABILITIES = "record", "probabilities"
DESCRIPTION = "tightframe.json"
NUMBERS = (7, 1)
"""Sizes of the batches of generated records for the comparison."""
FEW, BISECTIONS, HALF, NEAR = 20, 24, 0.5, 0.3
NEEDED = ("onnx", "onnxruntime", "onnxscript")
Batches = Sequence[NDArray[np.float32]]
RUN = """
import os, sys
from monai.bundle import run
config, root, *batches = sys.argv[1:]
for batch in batches:
    os.replace(batch, os.path.join(root, "input.npy"))
    run(config_file=config, bundle_root=root)
    os.replace(os.path.join(root, "output.npy"), batch)
"""
"""Program that runs a bundle and replaces each batch by its probabilities; MONAI takes seconds to import."""
CONFIG, METADATA, SCRIPT = "configs/inference.json", "configs/metadata.json", "models/model.ts"


@runtime_checkable
class ForExport(Protocol):
    """A part of a network that computes differently in exports."""

    def prepare_export(self) -> None:
        """Switch to computations that exports support."""


class Probabilities(nn.Module):
    """Probabilities (n, C) of records (n, ...), as float32."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        network = unfrozen(copy.deepcopy(model.module)).to("cpu")
        for part in network.modules():
            if isinstance(part, ForExport):
                part.prepare_export()
        self.network = network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self._predict = model.setup.method.predict
        self._findings = model.findings
        self.eval()

    def forward(self, record: torch.Tensor) -> torch.Tensor:
        """Return the softmax of the logits, or the sigmoid for findings."""
        logits = self._predict(self.network, record).float()
        return outputs.probabilities(logits, findings=self._findings)


@dataclass(frozen=True)
class Exported:
    """The written files.

    Attributes:
        path: file, or folder of a bundle.
        difference: largest difference of a probability from the model's, on generated records.
    """

    path: Path
    difference: float


def export(model: TrainedModel, form: Format, out: Path, *, tolerance: float = TOLERANCE) -> Exported:
    """Write a model in another form, after checking that it gives the same probabilities.

    Args:
        out: file, or folder for a bundle; it must not exist.
        tolerance: largest difference of a probability.

    Raises:
        ModelError: TF-825 if a package is missing, or, naming it, for a part of the network that this form
            cannot hold; TF-826 if the export differs.
    """
    make, run = {"onnx": (_onnx, _run_onnx), "torchscript": (_script, _run_script)}.get(
        form, (_bundle, _run_bundle)
    )
    if form == "onnx" and (missing := [name for name in NEEDED if find_spec(name) is None]):
        raise ModelError(
            f"Expected the packages {', '.join(missing)} for an export to ONNX, but they are not installed: "
            "pip install 'tightframe[export]'.",
            code="TF-825",
        )
    network = Probabilities(model)
    with tempfile.TemporaryDirectory(prefix="tightframe-") as place:
        draft = Path(place) / (out.name or "export")
        with warnings.catch_warnings(), _quiet("torch.onnx"):
            warnings.simplefilter("ignore")  # the exporters' own
            try:
                make(model, network, draft)
            except Exception as error:  # each exporter has its own errors
                part = failing_part(network, _records(model, 2, 0), _attempt(form))
                message = (str(error).strip().splitlines() or [""])[0][:200]
                raise ModelError(
                    f"Expected a network that {form} can hold, but {part} cannot be exported: "
                    f"{type(error).__name__}: {message}. Try another format, or use tightframe.load_model.",
                    code="TF-825",
                ) from error
            difference = _largest_difference(model, draft, run)
        if not difference <= tolerance:
            raise ModelError(
                f"Expected {form} to give the model's probabilities to {tolerance:g}, but they differ by "
                f"{difference:.3g} on generated records: nothing was written.",
                code="TF-826",
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        if not model.path.stat().st_mode & 0o077:  # a silo's own
            draft.chmod(0o700 if draft.is_dir() else 0o600)
        shutil.move(draft, out)
    return Exported(out, difference)


def description(model: TrainedModel) -> dict[str, Any]:
    """Return the export's description: model, input, classes, card.

    For a silo's model it has the job but no results, which are private to the silo.
    """
    form = _form(model)
    options = model.setup.job.dataset_options
    values: dict[str, Any] = {
        "format": 1,
        "model_sha256": model.hash,
        "class_names": list(model.class_names),
        **({"findings": True} if model.findings else {}),
        "input": {
            "name": RECORD,
            "shape": ["n", *model.input_shape],
            "dtype": "float32",
            "records": "as after the transforms of the data set's evaluation",
            "data_set": model.setup.dataset.name,
            **({} if form is None else {"made_of": form.said}),
        },
        "output": {"name": PROBABILITIES, "shape": ["n", len(model.class_names)], "dtype": "float32"},
        "synthetic": model.synthetic,
        "versions": {"tightframe": __version__, "torch": torch.__version__},
    }
    if "contract" in options:
        values["contract"] = options["contract"]
    if model.setup.dataset.name == "table":
        contract = Contract.model_validate(options["contract"])
        pairs = zip(contract.features, contract.formulas, strict=True)
        values["input"]["values"] = [{"name": name, "is": formula} for name, formula in pairs]
    if model.setup.dataset.name == "images":
        values["input"]["value"] = PictureContract.model_validate(options["contract"]).picture.formula
    if isinstance(model.card, Card):
        return {**values, "card": model.card.as_json()}
    return {**values, "job": model.card.job}


def failing_part(
    network: nn.Module, record: torch.Tensor, attempt: Callable[[nn.Module, tuple[torch.Tensor, ...]], Any]
) -> str:
    """Return the name and class of the innermost part of a network that cannot be exported.

    Args:
        record: to run the network on once, to record the inputs of its parts.
        attempt: exports a module with its inputs; raises if it cannot.
    """
    inputs_of: dict[str, tuple[Any, ...]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: inputs_of.setdefault(name, inputs))
        for name, module in network.named_modules()
    ]
    try:
        with torch.no_grad():
            network(record)
    finally:
        for hook in hooks:
            hook.remove()
    name, inside = "", True
    while inside:
        inside = False
        for child, module in network.get_submodule(name).named_children():
            place = f"{name}.{child}" if name else child
            inputs = inputs_of.get(place, ())
            if not inputs or not all(isinstance(item, torch.Tensor) for item in inputs):
                continue
            try:
                attempt(module, inputs)
            except Exception:
                name, inside = place, True
                break
    shown = name.removeprefix("network.") or "the network"
    return f"{shown} ({type(network.get_submodule(name)).__name__})"


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Limit a package's loggers to errors, as exporters warn of optional packages."""
    levels = {
        logging.getLogger(of): logging.getLogger(of).level
        for of in [name, *logging.root.manager.loggerDict]
        if of == name or of.startswith(f"{name}.")
    }
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _attempt(form: Format) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], Any]:
    if form != "onnx":
        return lambda module, inputs: torch.jit.trace(module, inputs)
    return lambda module, inputs: torch.onnx.export(module, inputs, dynamo=True, verbose=False)


def _form(model: TrainedModel) -> RecordForm | None:
    spec = model.setup.dataset
    options = spec.options.model_validate(model.setup.job.dataset_options)
    return None if spec.form is None else spec.form(options)


def _records(model: TrainedModel, number: int, seed: int) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(number, *model.input_shape, generator=stream)


def _largest_difference(
    model: TrainedModel, path: Path, run: Callable[[Path, Batches], list[NDArray[Any]]]
) -> float:
    """Return the largest difference of a probability on generated records; infinity for another shape.

    One record is between two classes, because confident models all give the same probabilities.
    """
    worst, between = 0.0, _unsure(model)
    batches = [_records(model, number, seed).numpy() for seed, number in enumerate(NUMBERS, start=1)]
    if between is not None:
        for records in batches:
            records[-1:] = between
    for records, theirs in zip(batches, run(path, batches), strict=True):
        ours = model.predict_proba(records)
        if theirs.shape != ours.shape or not np.isfinite(theirs).all():
            return float("inf")
        worst = max(worst, float(np.abs(theirs - ours).max()))
    return worst


def _unsure(model: TrainedModel) -> NDArray[np.float32] | None:
    """Return a record (1, ...) between two classes, by bisection; None if all have one answer."""
    drawn = _records(model, 3 * FEW, 0).numpy()
    scales = np.repeat(np.array([1, 10, 0.1], dtype=np.float32), FEW)
    drawn = drawn * scales.reshape(-1, *[1] * (drawn.ndim - 1))
    likely = model.predict_proba(drawn) > HALF
    place = next((place for place, column in enumerate(likely.T) if len(set(column.tolist())) == 2), None)
    if place is None:
        return None
    low, high = (drawn[likely[:, place] == side][:1] for side in (False, True))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        probability = model.predict_proba(middle)[0, place]
        if abs(probability - HALF) < NEAR:
            return middle
        low, high = (low, middle) if probability > HALF else (middle, high)
    return low


def _onnx(model: TrainedModel, network: nn.Module, path: Path) -> None:
    import onnx

    torch.onnx.export(
        network,
        (_records(model, 3, 0),),
        path,
        dynamo=True,
        input_names=[RECORD],
        output_names=[PROBABILITIES],
        dynamic_shapes=({0: torch.export.Dim("n")},),
        external_data=False,
        verbose=False,
    )
    stored = onnx.load(path)
    onnx.checker.check_model(stored)
    properties = {
        "tightframe": json.dumps(description(model)),
        "model_sha256": model.hash,
        "class_names": json.dumps(model.class_names),
    }
    onnx.helper.set_model_props(stored, properties)
    onnx.save(stored, path)


def _run_onnx(path: Path, batches: Batches) -> list[NDArray[Any]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [session.run([PROBABILITIES], {RECORD: records})[0] for records in batches]


def _script(model: TrainedModel, network: nn.Module, path: Path) -> None:
    with torch.no_grad():
        # torch's own check traces again and compares on the same records; ours compares on others.
        traced = torch.jit.trace(network, _records(model, 3, 0), check_trace=False)
    torch.jit.save(traced, path, _extra_files={DESCRIPTION: json.dumps(description(model))})


def _run_script(path: Path, batches: Batches) -> list[NDArray[Any]]:
    network = torch.jit.load(path, map_location="cpu")
    with torch.no_grad():
        return [network(torch.from_numpy(records)).numpy() for records in batches]


def _bundle(model: TrainedModel, network: nn.Module, folder: Path) -> None:
    """Write MONAI's folder: configs, the network as TorchScript, a page, and the description."""
    for name in ("configs", "models", "docs"):
        (folder / name).mkdir(parents=True)
    _script(model, network, folder / SCRIPT)
    about = description(model)
    for name, values in ((CONFIG, _inference()), (METADATA, _metadata(model)), (DESCRIPTION, about)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / "docs" / "README.md").write_text(
        f"# {model.setup.job.job_name}\n\n{model.setup.method.title} on {model.setup.dataset.title}; model "
        f"SHA-256 {model.hash}. For research only.\n\n`input.npy` has records "
        f"{about['input']['shape']}, float32, {about['input']['records']}; the run writes `output.npy`, "
        f"probabilities of {', '.join(model.class_names)}.\n\n    python -m monai.bundle run --config_file "
        f"{CONFIG} --bundle_root .\n",
        encoding="utf-8",
    )


def _inference() -> dict[str, Any]:
    return {
        "imports": ["$import numpy", "$import torch"],
        "bundle_root": ".",
        "device": "$torch.device('cpu')",
        "input": "$@bundle_root + '/input.npy'",
        "output": "$@bundle_root + '/output.npy'",
        "network_def": f"$torch.jit.load(@bundle_root + '/{SCRIPT}', map_location=@device)",
        "network": "$@network_def.eval()",
        "inferer": {"_target_": "SimpleInferer"},
        "records": "$torch.from_numpy(numpy.load(@input)).float().to(@device)",
        "run": ["$numpy.save(@output, @inferer(@records, @network).detach().cpu().numpy())"],
    }


def _metadata(model: TrainedModel) -> dict[str, Any]:
    """Return MONAI's metadata of a bundle."""
    import monai

    job, classes = model.setup.job, model.class_names
    return {
        "version": "1.0.0",
        "changelog": {"1.0.0": "exported by Tightframe"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__,
        "numpy_version": np.__version__,
        "required_packages_version": {},
        "task": f"classification: {', '.join(classes)}",
        "description": f"{model.setup.method.title} on {model.setup.dataset.title}, model {model.hash}",
        "authors": f"trained by the silos of {job.job_name} with Tightframe {__version__}",
        "copyright": "as the owners of the model say",
        "intended_use": "research only",
        "network_data_format": {
            "inputs": {
                RECORD: {
                    "type": "image" if len(model.input_shape) > 1 else "tabular",
                    "num_channels": model.input_shape[0],
                    "spatial_shape": list(model.input_shape[1:]),
                    "dtype": "float32",
                    "is_patch_data": False,
                }
            },
            "outputs": {
                PROBABILITIES: {
                    "type": "probabilities",
                    "num_channels": len(classes),
                    "dtype": "float32",
                    "channel_def": {str(place): _text(name) for place, name in enumerate(classes)},
                }
            },
        },
    }


def _text(name: str) -> str:
    """Quote a name from the job's author, so that MONAI does not take it for a program, reference or file."""
    return repr(name) if name.startswith(("$", "@", "%")) else name


def _run_bundle(folder: Path, batches: Batches) -> list[NDArray[Any]]:
    """Run a copy of a bundle in its own process, as ``python -m monai.bundle run`` does.

    Raises:
        ModelError: TF-825 if that fails, with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="tightframe-") as place:
        root = Path(place) / "bundle"
        shutil.copytree(folder, root)
        files = [Path(place) / f"{number}.npy" for number in range(len(batches))]
        for file, records in zip(files, batches, strict=True):
            np.save(file, records)
        command = [sys.executable, "-c", RUN, str(root / CONFIG), str(root), *map(str, files)]
        # Our own interpreter, on files written here.
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place)  # noqa: S603
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ModelError(
                f"Expected monai.bundle to run the bundle, but it failed: {last[:300]}", code="TF-825"
            )
        return [np.load(file, allow_pickle=False) for file in files]
