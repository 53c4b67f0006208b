"""Listening sockets of one address. torch's stores would listen on all addresses of the node."""

import socket

_BACKLOG = 2048
"""Connections that wait to be accepted; as many as torch's own stores allow."""


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of this node's address `host`, and on no other address.

    Raises:
        OSError: `host` is no address of this node.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
