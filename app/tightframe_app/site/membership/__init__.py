"""`tightframe site join`, `start` and `leave`: taking part in a federation, and ending it."""
