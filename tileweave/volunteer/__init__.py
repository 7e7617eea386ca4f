"""The native volunteer: a device of the swarm without a browser, speaking the same protocol.

Reading order: `panels.py` (what it holds), `session.py` (the conversation, sans-I/O), `compute.py` (the kernels),
`emulate.py` (slow devices, slow links, liars), `identity.py` (who it is next time), `net.py` (socket, workers,
reconnects), `main.py` (the command). Nothing here imports NumPy before `main` has told its BLAS to use one thread.
"""
