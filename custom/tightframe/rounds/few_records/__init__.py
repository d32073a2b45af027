"""Refuse exact sums of a job from which single records could be computed (``records_per_feature``)."""
