"""How the terms of one exchange become a sum: plain or secure."""
