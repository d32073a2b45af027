"""A trained model outside a run: loading from its results, prediction, export."""
