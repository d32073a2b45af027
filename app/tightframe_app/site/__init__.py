"""`tightframe site`: checks, decisions and processes at a hospital."""
