"""The configurations of jobs and sites: frozen, validated, all errors reported at once."""
