"""Is this result the product? freivalds.py is the mathematics, verifier.py what is computed once and kept."""
