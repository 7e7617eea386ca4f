"""What outlives every process: jobs, the ledger, devices, in one SQLite file. Start at database.py."""
