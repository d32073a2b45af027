"""`tightframe federation`: startup kits, requests and pins."""
