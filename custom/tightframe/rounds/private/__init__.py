"""Differential privacy in a run: what a job plans, what a silo draws and charges, what the server reads."""
