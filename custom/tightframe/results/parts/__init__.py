"""Parts of several result files: metrics, lost silos, budgets, update norms, withdrawals."""
