"""``tightframe explain``: what an error code, a value of a job, a site's rule or an option means."""
