"""Gradients in place of model updates: over a silo's whole fold, and rounds that are one sum of them."""
