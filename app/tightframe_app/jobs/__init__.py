"""`tightframe jobs`, `simulate` and `methods`: recipes, job folders, pairs of method and data."""
