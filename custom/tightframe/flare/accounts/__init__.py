"""Two accounts at one site: the engine's client runs in one, the processes of jobs in the other."""
