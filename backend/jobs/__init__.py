"""A running job's coordinator process: the core in its shell, between the script, the gateways and the store."""
