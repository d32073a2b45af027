"""Files that a run leaves, and the status that it tells meanwhile: one model each, written and read by it."""
