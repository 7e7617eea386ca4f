"""The server: cores without I/O, the shells around them, and the command line that wires both."""
