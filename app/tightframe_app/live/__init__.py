"""Pages for a browser on this machine while a command runs."""
