"""Differential privacy: mechanisms, what they cost, and the site's ledger of what was spent."""
