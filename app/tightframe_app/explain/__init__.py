"""``tightframe explain``: meaning of an error code, a job's value, a site's rule or an option."""
