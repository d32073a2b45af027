"""Phases of a run that belong to no method: statistics before it, its closing, personal models after it."""
