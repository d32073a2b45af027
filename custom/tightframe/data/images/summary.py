"""Summary of a site's pictures: sizes and light by class. Exact, so for the site alone."""

from __future__ import annotations

import numpy as np

from tightframe.data.contract import Column
from tightframe.data.images import ImagesSite
from tightframe.data.images.contract import PictureContract
from tightframe.data.images.files import quiet, read
from tightframe.data.images.silo import encoded_records, place_of
from tightframe.data.table.encoding import check_mapping
from tightframe.data.table.summary import Description, description, grouped, summary_of

_AXES = ("depth", "height", "width")
_CHANNELS = {1: ("brightness",), 3: ("red", "green", "blue")}


def describe(contract: PictureContract, site: ImagesSite) -> Description:
    """Return the summary of a site's pictures; records that break the contract are counted and left out.

    Sides are the files' own; brightness is the mean of a picture's pixels as the model gets them, 0 to 255,
    and contrast their deviation.

    Raises:
        DataError: as ``encoded_records`` and ``check_mapping``.
    """
    check_mapping(contract, site)
    rows, encoded, _ = encoded_records(contract, site)
    kept = np.flatnonzero(~encoded.broken)
    labels, titles, of_findings = grouped(contract, encoded.labels[kept])
    picture = contract.picture
    paths, root = rows.cells[picture.column], site.root.resolve()
    with quiet():
        sides = [read(place_of(str(paths[row]), root), picture).shape[:-1] for row in kept]
    axes = _AXES[-picture.dimensions :]
    pixels = encoded.features[kept].reshape(len(kept), picture.channels, -1)
    measured = {axis: np.array([one[place] for one in sides], float) for place, axis in enumerate(axes)}
    for place, channel in enumerate(_CHANNELS[picture.channels]):
        measured[channel] = pixels[:, place].mean(axis=1)
    measured["contrast"] = pixels.std(axis=(1, 2))
    summaries = []
    for title, values in measured.items():
        most = 255.0 if title not in axes else float(max([*values, 8.0])) * 1.05
        column = Column(
            column=title, kind="number", low=0.0, high=most, unit="pixels" if title in axes else None
        )
        scaled = (2 * values / most - 1)[:, None]
        summaries.append(summary_of(column, scaled, labels, 0, titles))
    return description(encoded, rows, labels, titles, summaries, **of_findings)
