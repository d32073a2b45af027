"""`tightframe watch`: the live view of a job."""
