"""The silo's half of a run."""
