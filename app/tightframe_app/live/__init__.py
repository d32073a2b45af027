"""Pages that a browser on this machine shows while a command runs."""
