"""The gateway: pages, REST and one websocket for each device; the only process that outsiders talk to.

Reading order: `socket.py` (who is let in), `session.py` (what a device may say), `outbox.py` (what it is sent, in
which order), `connection.py` (the two tied to a socket), `fleet.py` (all connections, and the streams to the other
processes), then `app.py` and the routes. It holds no state that matters: kill it, and the devices come back.
"""
