"""Noisy sums and counts over records: the amount of noise, its drawing, and the reading of totals."""
