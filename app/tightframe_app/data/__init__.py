"""`tightframe data`: contracts, descriptions of a site's records, preparation of downloads."""
