"""`tightframe ledger`: a site's privacy ledger."""
