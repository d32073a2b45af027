"""Counts of a silo's own records: for the class rules, the rules on few records, and withdrawals."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator

import numpy as np
import torch

from tightframe.data.base import (
    class_counts,
    class_patients,
    finding_counts,
    in_steps,
    own_labels,
    own_patients,
)
from tightframe.data.table import TableOptions
from tightframe.data.withdrawn import patients_of, record_ids
from tightframe.learning.few_records import class_parts
from tightframe.learning.few_records.distinct_rows import DistinctRows, own_rows, row_digests
from tightframe.learning.few_records.record_values import column_bits, count_values
from tightframe.learning.model_update import shared_template
from tightframe.phases import Fold, OwnRows, Setting
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import EVALUATED
from tightframe.rounds.few_records.planned import sums_columns
from tightframe.rounds.few_records.rule import least_class_values
from tightframe.rounds.job_checks import STANDARDISE_STD
from tightframe.rounds.moments import UNIFORM, WEIGHED, mean_and_deviation, times_in_moments
from tightframe.rounds.setup import JobSetup


class OwnCounts(ABC):
    """The counting half of a silo's view (``rounds.silo.view.LocalSilo``).

    Attributes:
        pooled: moments of inputs in the state of the sum, see ``rounds.moments.packed``; None
            without any.
        weight: this silo's public weight in the sum.
        withhold: folds that a withdrawal no longer evaluates, as this site's limits leave no room.
    """

    context: SiloContext
    setup: JobSetup
    setting: Setting
    pooled: torch.Tensor | None
    weight: float
    withhold: Collection[Fold]

    @abstractmethod
    def inputs(
        self, *, staying: bool = False, evaluated: bool = False, rounded: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches of the training records' inputs, not features of a loaded model, and labels.

        Args:
            staying, evaluated: see ``record_values``.
            rounded: see ``SiloContext.common``.
        """

    def class_counts(self, fold: Fold, *, distinct: bool = False) -> torch.Tensor:
        """Count the records of each class in a fold, int64 (C,).

        Args:
            distinct: count repeated training records once.
        """
        data = self.context.data
        labels = own_labels(data) if distinct and fold == "train" else data.labels(fold)
        return torch.from_numpy(class_counts(labels, self.setting.num_classes))

    def finding_counts(self) -> torch.Tensor:
        """Count distinct training records with each finding, and without it: int64 (K, 2).

        The number of the others, of which it is unknown, is a multiple of ``min_class_count``.
        """
        return torch.from_numpy(finding_counts(in_steps(own_labels(self.context.data), self.min_class_count)))

    def held_counts(self) -> torch.Tensor:
        """Count patients with training records of each class for the class rules: int64 (C,).

        Of a finding those with it or those without it, whichever are fewer: records of which it is unknown
        are none or enough. With privacy distinct records count.
        """
        data, findings = self.context.data, self.setting.findings
        if self.setup.privacy is not None:
            return self.finding_counts().amin(1) if findings else self.class_counts("train", distinct=True)
        labels = in_steps(data.labels("train"), self.min_class_count) if findings else data.labels("train")
        return torch.from_numpy(class_patients(data, labels, self.setting.num_classes))

    @property
    def drawn_records(self) -> int:
        """Number of records that an epoch of training takes, repeats counted."""
        return self.context.drawn_records

    def times_in_moments(self, admitted: torch.Tensor | None) -> torch.Tensor:
        """Return how often each training record counts in moments of the inputs, float64 (n,).

        Args:
            admitted: the classes in them, bool (C,); None for all that count in public.
        """
        labels = self.context.data.labels("train")
        counted = torch.from_numpy(self.context.counted_in_public(labels))
        if admitted is not None:
            counted &= admitted[torch.from_numpy(labels)]
        records, times = int(counted.sum()), torch.zeros(len(counted), dtype=torch.float64)
        if self.setup.job.weights == "uniform":
            times[counted] = times_in_moments(records, UNIFORM, self.min_class_count).double() / UNIFORM
        elif records:
            most = WEIGHED * self.weight
            times[counted] = 1.0 if most >= records else 2.0 ** math.floor(math.log2(most / records))
        return times

    @property
    def sums_columns(self) -> bool:
        """Check whether the job sums a table's columns themselves, by class or as products."""
        return sums_columns(self.setup)

    @property
    def min_class_count(self) -> int:
        """Least number of patients of a class with which this silo takes part in that class."""
        return self.context.min_class_count

    @property
    def records_per_feature(self) -> int:
        """Least number of records for each feature whose exact products leave this silo; 0 for no rule."""
        return self.context.policy.records_per_feature

    def enough_of_class(self) -> torch.Tensor:
        """Return a mask of the classes of which this silo's records have enough values, bool (C,).

        Without sums by class in training all classes pass. With them the mask is of all sums of the job: what
        two sums differ in would be this silo's own. So where the columns themselves are summed, which a silo
        adds in the moments, too, pooled moments hide none of their values. In other networks they may: a
        class is then in the moments and in no later sum, which tells its number of records.
        """
        synthetic = self.context.data.synthetic
        least = 0 if synthetic else least_class_values(self.context.policy, self.setup)
        if not least:
            return torch.ones(self.setting.num_classes, dtype=torch.bool)
        rows = self.own_rows(pooled=not self.sums_columns)
        return rows.by_class * rows.values >= least

    def backed(self, sizes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return a mask of the parts of each class's sum that enough of its records make, bool (C, K).

        Args:
            sizes: weight of each training record in each part, none negative, (n, K); all parts have equally
                many numbers.
            labels: (n,), of all training records in order, or of none.
        """
        if not self.records_per_feature:  # no rule: nothing is counted
            return torch.ones(self.setting.num_classes, sizes.shape[1], dtype=torch.bool)
        ruled = not self.context.data.synthetic
        needed = least_class_values(self.context.policy, self.setup) / sizes.shape[1] if ruled else 0.0
        counts, distinct = (self.class_counts("train", distinct=only) for only in (False, True))
        return class_parts.backed(
            sizes,
            labels,
            torch.from_numpy(own_patients(self.context.data)[: len(labels)]),
            repeats=(counts / distinct.clamp_min(1)).ceil().clamp_min(1),
            least=self.min_class_count,
            values=self.own_rows().values if needed else torch.ones(self.setting.num_classes),
            needed=needed,
        )

    def record_values(
        self, *, staying: bool = False, evaluated: bool = False, pooled: bool = True
    ) -> torch.Tensor:
        """Return how many unknown numbers a training record of each class has, float64 (C,).

        Args:
            staying: count the records that stay in a withdrawal, not those before it.
            evaluated: count inputs as evaluations take them, not as the job trains on them
                (``common_values``).
            pooled: count columns by their spread once silos' moments divide them.
        """
        return count_values(
            self.inputs(staying=staying, evaluated=evaluated),
            self.setting.num_classes,
            self.setup.columns,
            self.min_class_count,
            scale=self._scale(pooled=pooled),
        )

    def column_bits(self, *, evaluated: bool = False) -> tuple[float, ...]:
        """Return the bits of each column of this silo's table (``learning.few_records.record_values``).

        They are computed once in a run. Numbers of units are rounded up to a power of two: otherwise the
        widest layers with which a job passes (TF-628) would tell how many patients stand out in a column.

        Args:
            evaluated: see ``record_values``.
        """
        cache, scale = self.context.own_bits, self._scale()
        key = evaluated, None if scale is None else scale.numpy().tobytes()
        if key not in cache:
            inputs = self.inputs(staying=True, evaluated=evaluated, rounded=True)
            cache[key] = column_bits(inputs, self.setup.columns, scale)
        return cache[key]

    def own_rows(self, *, staying: bool = False, pooled: bool = True) -> OwnRows:
        """Return the numbers of distinct training records, and of their values; counted once in a run.

        Args:
            staying, pooled: see ``record_values``.
        """
        cache, scale = self.context.own_rows, self._scale(pooled=pooled)
        key = staying, None if scale is None else scale.numpy().tobytes()
        if key not in cache:
            rows = DistinctRows(self.setting.num_classes)
            rows.add(*self.rows(staying=staying))
            cache[key] = own_rows(rows, self.record_values(staying=staying, pooled=pooled))
        return cache[key]

    def rows(self, *, staying: bool = False) -> tuple[list[bytes], torch.Tensor]:
        """Return a digest of each training record's inputs, and labels (n,), in order.

        Args:
            staying: see ``record_values``.
        """
        rows, labels = list[bytes](), [torch.zeros(0, dtype=torch.int64)]
        for inputs, classes in self.inputs(staying=staying):
            rows += row_digests(inputs)
            labels.append(classes.cpu())
        return rows, torch.cat(labels)

    def _scale(self, *, pooled: bool = True) -> torch.Tensor | None:
        """Return the divisor that the model applies to each input of a table; None if nobody sets one.

        Args:
            pooled: see ``record_values``.
        """
        if len(shape := self.setting.input_shape) != 1:
            return None
        if STANDARDISE_STD in shared_template(self.setting).state_dict():
            return mean_and_deviation(self.pooled)[1] if pooled and self.pooled is not None else None
        ranges = isinstance(self.setup.dataset_options, TableOptions)  # the job's contract has them
        return torch.ones(shape, dtype=torch.float64) if ranges else None

    def class_patients(self, fold: Fold) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count patients by class: with withdrawn records, with any before, and with others, int64 (C,)."""
        data, names = self.context.before_withdrawal.data, self.context.withdrawn.names
        withdrawn, before, others = patients_of(data, fold, names, self.setting.num_classes)
        return torch.from_numpy(withdrawn), torch.from_numpy(before), torch.from_numpy(others)

    def withdrawn_from(self, fold: Fold) -> tuple[torch.Tensor, bool]:
        """Return the labels (n,) of a fold's withdrawn records, and whether it is to be evaluated no more.

        The latter if too few leave or stay, or if this site's limits leave no room. No labels if the previous
        run's counts left the fold out: its records then hide nobody in the difference.
        """
        context, data = self.context, self.context.before_withdrawal.data
        before, after = (
            {part for part in parts if part.startswith(fold)}
            for parts in (context.untold(), context.untold(without_withdrawn=True))
        )
        names = set() if fold in before else context.withdrawn.names
        gone = np.array([name in names for name in record_ids(data, fold)], dtype=bool)
        patients = len(np.unique(own_patients(data, fold)[gone]))
        few = fold in EVALUATED and 0 < patients < context.policy.min_test_count
        labels = torch.from_numpy(data.labels(fold)[gone])
        return labels, few or before != after or fold in self.withhold
