"""Status and curves of a run for people: the engine's consoles, and boards."""
