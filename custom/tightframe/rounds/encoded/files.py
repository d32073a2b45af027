"""Features of a frozen encoder on the site's disk, if its configuration asks for that (``feature_cache``).

Features disclose nearly as much as the records do: folders have mode 0700 and files 0600, below the site's
state and never in what the engine sends. A file is used only if nothing that features depend on has changed:
its name is a hash of encoder, versions and device, and it contains the SHA-256 of all records as the encoder
gets them, hence of the pictures and of their transform.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from tightframe import __version__
from tightframe.files import write_atomically
from tightframe.phases import Fold
from tightframe.rounds.feature_folders import SUFFIX
from tightframe.rounds.state_files import FEATURES

if TYPE_CHECKING:
    from tightframe.rounds.context import SiloContext

_HEADER = 8
"""Bytes of a safetensors file that hold the length of its JSON header."""


class RecordsDigest:
    """SHA-256 of records in the order in which an encoder gets them."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: (B, ...) and (B,)."""
        self._digest.update(f"{inputs.dtype} {tuple(inputs.shape)}\n".encode())
        for value in (inputs, labels):
            self._digest.update(_bytes(value))

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()


@dataclass(frozen=True)
class StoredFeatures:
    """Features and labels of a fold as stored in a file.

    Attributes:
        features: (n, d).
        labels: (n,) int64.
        records: see ``RecordsDigest``.
    """

    features: torch.Tensor
    labels: torch.Tensor
    records: str


class FeatureFiles:
    """Feature files of one encoder for one silo's records.

    Args:
        folder: of this data set's files.
        encoder: hex digest of everything except the records that features depend on.
    """

    def __init__(self, folder: Path, encoder: str, log: logging.Logger) -> None:
        self._folder, self._encoder, self._log = folder, encoder, log

    @classmethod
    def of(
        cls, context: SiloContext, encoder: str, device: torch.device, *, exact: bool
    ) -> FeatureFiles | None:
        """Return the files of a silo's features; None if its site keeps them in memory only.

        Args:
            encoder: SHA-256 of the encoder's tensors.
            device: on which features are computed.
            exact: whether in float64.
        """
        if (folder := context.feature_folder) is None:
            return None
        job = context.job
        records = [context.site.records_id(job.dataset), job.dataset, job.dataset_options]
        computed = {
            "encoder": encoder,
            "model": job.model_at(context.name).model_dump(mode="json"),
            "exact": exact,
            "batch_size": job.evaluation.batch_size,  # on which the last bits may depend
            "threads": torch.get_num_threads(),
            "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
            "versions": [__version__, torch.__version__],
        }
        return cls(folder / _name(records)[:16], _name(computed), context.log)

    def read(self, fold: Fold) -> StoredFeatures | None:
        """Return the stored features of a fold; None if there are none, or (logged) they are damaged."""
        path = self._path(fold)
        try:
            content = path.read_bytes()
            length = int.from_bytes(content[:_HEADER], "little")
            metadata = json.loads(content[_HEADER : _HEADER + length])["__metadata__"]
            tensors = load(content)
            features, labels = tensors["features"], tensors["labels"]
            if metadata["sha256"] != _content_sha256(features, labels):
                raise ValueError("other bytes than were written")
            return StoredFeatures(features, labels, metadata["records"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._log.warning("%s is damaged (%s): its features are computed again", path, error)
            return None

    def write(self, fold: Fold, stored: StoredFeatures) -> None:
        """Store the features of a fold."""
        private_folder(self._folder)
        metadata = {"records": stored.records, "sha256": _content_sha256(stored.features, stored.labels)}
        tensors = {"features": stored.features.contiguous(), "labels": stored.labels.contiguous()}
        write_atomically(self._path(fold), save(tensors, metadata), mode=0o600)

    def forget(self, fold: Fold) -> None:
        """Delete a fold's features by every encoder: its records have changed."""
        for path in self._folder.glob(f"{fold}-*{SUFFIX}"):
            path.unlink(missing_ok=True)

    def _path(self, fold: Fold) -> Path:
        return self._folder / f"{fold}-{self._encoder}{SUFFIX}"


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter, and the one named ``features`` above it."""
    above = [folder, *folder.parents]
    depth = next(place for place, item in enumerate(above) if item.name == FEATURES)
    for item in reversed(above[: depth + 1]):
        item.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(item, 0o700)


def _content_sha256(features: torch.Tensor, labels: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for value in (features, labels):
        digest.update(f"{value.dtype} {tuple(value.shape)}\n".encode() + _bytes(value))
    return digest.hexdigest()


def _bytes(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().numpy().tobytes()


def _name(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
