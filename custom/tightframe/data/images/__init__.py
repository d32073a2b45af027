"""Pictures and volumes as a data set: the job brings the contract, the site's entry says where they lie.

A site has a manifest, a table with the path of each picture and its label, or a folder for each class.
Torch-free; what reads files is imported when it is needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from tightframe.data.base import DatasetSpec, SitePath
from tightframe.data.images.contract import PictureContract
from tightframe.data.table import TableSite, of_contract
from tightframe.options import StrictModel
from tightframe.registry import deferred


class ImagesOptions(StrictModel):
    """A job's options for pictures.

    Attributes:
        contract: what every silo's records are.
    """

    contract: PictureContract


class ImagesSite(TableSite):
    """A site's entry for its pictures; the manifest's keys are those of a table.

    Attributes:
        root: folder under which all pictures are; a path that leads out of it, by a link too, breaks the
            contract.
        layout: ``manifest``: ``file`` or ``database`` has the paths; ``folders``: the folders in ``root`` are
            the classes.
    """

    root: SitePath
    layout: Literal["manifest", "folders"] = Field(default="manifest")

    @property
    def place(self) -> str:
        """Where the records are, for messages."""
        return str(self.root) if self.layout == "folders" else super().place

    @model_validator(mode="after")
    def _can_be_read(self) -> ImagesSite:
        if self.layout == "manifest":
            super()._can_be_read()  # type: ignore[operator]  # pydantic keeps it callable
        elif given := {"file", "database", "columns", "delimiter", "encoding"} & self.model_fields_set:
            raise ValueError(f"Expected no {sorted(given)} where `layout` is folders")
        if {"units", "decimal"} & self.model_fields_set:
            raise ValueError("Expected no `units` and `decimal`, which are for tables of numbers")
        return self


def _of(spec: DatasetSpec, options: Any) -> DatasetSpec:
    """Return the data set of a contract."""
    return replace(of_contract(spec, options), augments=options.contract.picture.augment is not None)


SPECS = {
    "images": DatasetSpec(
        name="images",
        title="pictures by contract",
        class_names=(),
        options=ImagesOptions,
        site=ImagesSite,
        input_shape=lambda options: options.contract.picture.shape,
        open=deferred("tightframe.data.images.silo", "open_site"),
        twin=deferred("tightframe.data.images.twin", "open_twin"),
        num_centers=0,
        form=deferred("tightframe.data.images.views", "form"),
        by_options=_of,
    ),
}
