"""The coordinator's core, sans-I/O: GEMMs and devices in, leases and verdicts out. `machine.Machine` is its face."""
