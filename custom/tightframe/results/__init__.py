"""A run's result files and its status while it runs: one model each, which writes and reads it."""
