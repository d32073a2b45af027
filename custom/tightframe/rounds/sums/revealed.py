"""Explain what totals reveal that differ in a setting of the release profile (``release.py``). Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_EQUATIONS = (
    "Each total is one equation in the silos' own updates. With as many such jobs as there are silos every "
    "silo's own update follows, exactly where nothing random is in it: with 3 silos, 3 jobs."
)
_NO_UPDATES = (
    "One of the jobs (`own as it is`) sends no update of a model: its totals are no equations in the silos' "
    "own updates, and the other's alone are one equation. `tightframe site check --job` says what it sends "
    "instead."
)
_KINKS = (
    "Each silo's update is cut or rescaled by itself before the sum, so that the total bends where one "
    "silo's update is as long as the limit. A series of such jobs reveals each silo's update, its length and "
    "its direction."
)
_CLASS_APART = (
    "A class counts at a silo under one rule and not under the other: the difference between both totals is "
    "that silo's own class mean and number of records."
)
_HEADS = (
    "Validation records' losses are summed at another head, which all hospitals' totals make: by heads that "
    "differ a little such totals disclose all features of one validation record."
)
_NONE_SENT = "own as it is"
"""Value of ``updates`` of a job whose sums have a constant in place of trained values (``own/trained``)."""
REVEALED: Mapping[str, str] = {
    "weights": _EQUATIONS,
    "max_weight_share": _EQUATIONS,
    "steps": (
        "How many steps a silo takes follows from its number of records and the size of batches; momentum "
        "and Adam weigh early and late steps differently. At small learning rates each total weighs the "
        "silos' own gradients by other numbers, so that a few such jobs are equations in these gradients."
    ),
    "updates": _EQUATIONS,
    "update_norm": _KINKS,
    "update_bound": _KINKS,
    "class_rules": _CLASS_APART,
    "prototype_sites": _CLASS_APART,
    "class_sums": (
        "Class means are added with other weights: each total is one more equation in the silos' own class "
        "means. They hardly change, so with as many such jobs as silos each silo's own class means follow, "
        "exactly."
    ),
    "site_models": (
        "A silo trains another model in one of the jobs: the difference between both totals of class sums is "
        "that silo's own, between its two models."
    ),
    "records": (
        "Some silos leave out or repeat records under one rule and not under the other: the difference "
        "between both totals is due to these records alone."
    ),
    "score_bins": (
        "Scores of one model are counted in bins with other edges: the difference between both counts is the "
        "number of records with a score between two edges, as narrow as one likes. A few such jobs disclose "
        "the scores of single test records, whichever silo's they are."
    ),
    "statistics": (
        "A column's range is cut into other bins: two histograms of the same records are equations in what "
        "each silo withholds of either, and narrow bins between both sets of edges follow from them."
    ),
    "own weight": (
        "Other silos declared other numbers of records, so that the cap on this silo's weight moved: the "
        "difference between both totals, less what is known of who declared them, is this silo's own update."
    ),
    "features": (
        "Products or class sums of other features of the same records are more equations in these records: "
        "enough such jobs disclose them, however many records stand behind each."
    ),
    "features in training": (
        "Features that begin from another seed are summed by class: trained at a small rate, they are more "
        "equations in the same records, and a few such jobs disclose a rare class's, exactly."
    ),
    "losses": (
        "Validation records' losses are summed at another head (`ridge`, `priors`, method): one more "
        "equation in these records' scores. Enough such jobs disclose single ones."
    ),
    "sums of columns": (
        "A table's statistics leave out small cells, and sums of the same records' columns (moments, class "
        "sums, products) do not: the difference is these cells, down to one patient's."
    ),
    "classes in products": (
        "Products of features are summed over other classes, as hospitals' flags decide: the difference "
        "between both totals is the products of a class's records alone, and of few it is these records."
    ),
    "classes in moments": (
        "Inputs and their squares are summed over other classes, as hospitals' flags decide: the difference "
        "between both totals is the sums of a class's records alone."
    ),
    "classes in losses": (
        "Validation records' losses are summed over other classes, at a head that knows others: one more "
        "equation in these records' scores."
    ),
    "encoder": (
        "The features' weights, or the means and deviations by which inputs are standardised, are others, as "
        "all hospitals' totals make them: these are other features of the same records, as a job with other "
        "features has them."
    ),
    "training": (
        "Models are trained in another way: a norm shortens each silo's update by its own length, and "
        "learning rate, epochs, weight decay or a method's terms weigh silos by their numbers of steps. A "
        "few such jobs reveal each silo's update, with other seeds too, to whoever has similar records."
    ),
    "moments": (
        "Models are trained on inputs standardised by other means and deviations, as all hospitals' totals "
        "make them. It is another way of training: smaller inputs make shorter updates, of which a norm cuts "
        "off less."
    ),
    "counts": (
        "Classes weigh otherwise in the loss, by other pooled counts, as all hospitals' totals make them: a "
        "few such jobs reveal each class's part of the update, of a rare class one silo's."
    ),
    "summed records": (
        "This site's records have changed, or which of their classes or columns count (too few values in one "
        "of the jobs). The difference between both totals is the sum of those that came or went, here and "
        "elsewhere: of one training record all its values, with its class."
    ),
    "head": _HEADS,
    "head that a withdrawal leaves": _HEADS,
    "own full_batches": (
        "This site's update is over all its records in one of the jobs, and over drawn ones in the other: "
        "the difference between both totals is due to this site's records that were not drawn, and to the "
        "others' draws."
    ),
    "own min_class_count": _CLASS_APART,
    "own class_values": _CLASS_APART,
    "own offer_prototypes": _CLASS_APART,
    "own min_test_count": (
        "This site's evaluation is in one total and not in the other: the difference is its own."
    ),
}
"""Explanation, by setting, of what two totals reveal that differ in it, for the person who decides."""


def what_both_reveal(name: str, values: Collection[str] = ()) -> str:
    """Return the explanation of a setting by its name, ignoring a part after ``from``.

    Earlier builds had one entry for each seed that trained.

    Args:
        name: of the setting.
        values: its values, if known: they show whether both jobs send updates at all.

    >>> what_both_reveal("training from seed 7", ["a", "b"]) == REVEALED["training"]
    True
    >>> what_both_reveal("updates", [_NONE_SENT, "update weighted", _NONE_SENT]) == REVEALED["updates"]
    False
    """
    if name == "updates" and _NONE_SENT in values and len(set(values)) == 2:
        return _NO_UPDATES
    return REVEALED[name.partition(" from ")[0]]
