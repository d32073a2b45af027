"""Checks of `tightframe site check`: one file each, and all of them in order."""
