"""`tightframe site`: what is checked, decided and stopped at a hospital."""
