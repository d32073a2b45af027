"""What exact sums of a job tell of single records, and what refuses them (``records_per_feature``)."""
