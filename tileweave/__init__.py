"""What of Tileweave runs on other people's machines and in their scripts: protocol, native volunteer, offload mode."""

__version__ = "0.1.0"
