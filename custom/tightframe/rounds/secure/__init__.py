"""Secure sums in a run: the protocol of ``tightframe.securesum`` with files, clocks and messages."""
