"""Checks of `tightframe site check`: one per file, and all of them in order."""
