"""Rounds of a run at silo and server, independent of the transport and the engine."""
