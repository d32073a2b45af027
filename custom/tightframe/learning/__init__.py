"""Local training and model updates: what methods are made of."""
