"""Two accounts at one site: the engine's client in one, the job's process in another."""
