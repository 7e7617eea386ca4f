"""Benches: each figure of the README has a command here that measures it on a running server."""
