"""What a silo checks before it takes part: a request's form and order, its records, what a job may tell."""
