"""The report of a run: one page from its result files, at the server and at each silo."""
