"""Sums of the silos' terms in one exchange: plain or secure."""
