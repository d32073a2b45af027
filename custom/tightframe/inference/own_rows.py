"""Rows of a site's table with its own names, codes and units, for a trained model to judge.

They are read as in training, by the site's entry and the job's contract; but the label and whatever the
model does not learn from need not be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from tightframe.data.contract import Contract
from tightframe.data.table import CSV_ENDINGS, PARQUET_ENDINGS, TableSite
from tightframe.data.table.encoding import features_of
from tightframe.data.table.sources.rows import read
from tightframe.errors import ModelError
from tightframe.inference.inputs import Problem


class OwnRows:
    """Rows of a file; see ``inputs.Inputs``.

    Args:
        path: of the file, in place of the entry's own table.
        contract: of the model's job.
        site: the site's entry.
        name_column: the column that names a row in the output, as the file calls it.

    Raises:
        ModelError: TF-823 for another kind of file.
        DataError: as ``data.table.sources.rows.read``.
    """

    left = 0

    def __init__(
        self, path: Path, contract: Contract, site: TableSite, name_column: str | None = None
    ) -> None:
        if not path.name.lower().endswith(CSV_ENDINGS + PARQUET_ENDINGS):
            raise ModelError(
                f"Expected a table ({', '.join(CSV_ENDINGS + PARQUET_ENDINGS)}), but got {path}.",
                code="TF-823",
            )
        learned = [column.column for column in contract.columns]
        wanted = [*learned]
        if name_column is not None:
            self._names = site.columns.get(name_column, name_column)
            wanted += [self._names] if self._names not in learned else []
        entry = site.model_copy(update={"file": path, "database": None})
        self._rows, self._named = read(contract, entry, wanted), name_column is not None
        self._kind = "line" if entry.is_text else "row"
        self._contract, self._entry = contract, entry
        self.problems = [
            Problem(f"{self._kind} {number}", "TF-824", "another number of values than the header")
            for number in self._rows.ragged
        ]

    def __len__(self) -> int:
        return len(self._rows.numbers) + len(self._rows.ragged)

    def records(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``inputs.Inputs``."""
        cells = self._rows.cells
        features, found = features_of(cells, len(self._rows.numbers), self._contract, self._entry)
        wrong: dict[int, list[str]] = {}
        for column, faults in found.items():
            for rule, places in faults.items():
                for place in places:
                    wrong.setdefault(place, []).append(f"{column}: {rule}")
        for place, number in enumerate(self._rows.numbers):
            name = (cells[self._names][place] if self._named else None) or f"{self._kind} {number}"
            if place in wrong:
                self.problems.append(Problem(name, "TF-824", "; ".join(wrong[place])))
            else:
                yield name, torch.from_numpy(features[place])
