"""`tightframe data`: contracts, a site's records described, downloaded data sets prepared."""
