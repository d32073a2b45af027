"""Riders: ``attach`` of each is a function ``Phase -> Phase``, with its fields and both halves beside it."""
