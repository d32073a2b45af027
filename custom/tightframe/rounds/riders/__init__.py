"""Riders, which travel with a phase; one file each: ``Phase -> Phase``, schema and both halves together."""
