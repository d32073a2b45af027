"""Noisy sums and counts over records of a class: how much noise, how it is drawn, how it is read."""
