"""The site's ledger of spending: data, rules, storage and proof."""
