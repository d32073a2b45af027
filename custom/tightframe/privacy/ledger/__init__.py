"""The site's ledger of what was spent: data, rules, storage and proof."""
