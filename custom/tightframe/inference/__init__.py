"""A trained model outside a run: loaded from the folder that a run left, applied to records, exported."""
