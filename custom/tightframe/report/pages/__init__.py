"""Pages of a server and of a silo, and their sections."""
