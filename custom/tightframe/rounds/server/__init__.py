"""The server's half of a run."""
