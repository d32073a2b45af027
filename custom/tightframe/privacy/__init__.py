"""Differential privacy: mechanisms, their cost, and the site's ledger of spending."""
