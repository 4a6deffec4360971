"""Decoding: rounds of draft, verify and commit, and the loops around them."""
