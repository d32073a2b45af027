"""Rounds without an engine: what a silo and the server do, whatever carries their messages."""
