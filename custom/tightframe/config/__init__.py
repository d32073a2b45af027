"""What a job may say and what a site says about itself: frozen, validated, all errors at once."""
