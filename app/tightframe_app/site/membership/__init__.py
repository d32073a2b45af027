"""Commands of `tightframe site` to join, start and leave a federation."""
