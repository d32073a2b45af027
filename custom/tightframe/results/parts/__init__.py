"""Parts that several result files share: metrics, silos lost, budgets, update norms, withdrawals."""
