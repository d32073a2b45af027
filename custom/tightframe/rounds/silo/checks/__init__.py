"""Checks of a silo before it takes part: a request's form and order, its records, a job's disclosures."""
