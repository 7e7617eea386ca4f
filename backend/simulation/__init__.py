"""A seeded simulator of everything around the coordinator's core and the allocator: `python -m backend.simulation`."""
