"""Processes that do not know the secret of a publish store, and knock at its port all the time."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rollout.transports.base import StoreAddress
from rollout.transports.store_server import MAX_STRANGERS, NONCE_BYTES, framed

LIES = (
    bytes(64) + framed([b"set", b"present/0", b"stranger"]),
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n",
)
"""A wrong proof with a request that would spoil a group, and what a port scanner sends; both as long as a proof."""
PAUSE_S = 0.005


@contextmanager
def knocking(address: StoreAddress) -> Iterator[list[bytes]]:
    """Context in which strangers connect to a store, lie to it, or say nothing; what they heard, without nonces."""
    heard: list[bytes] = []
    ended = threading.Event()
    knocker = threading.Thread(target=_knock, args=((address.host, address.port), ended, heard))
    knocker.start()
    try:
        yield heard
    finally:
        ended.set()
        knocker.join()


def _knock(at: tuple[str, int], ended: threading.Event, heard: list[bytes]) -> None:
    silent: list[socket.socket] = []
    while not ended.wait(PAUSE_S):
        with suppress(OSError):
            for lie in LIES:
                with socket.create_connection(at, timeout=1.0) as connection:
                    connection.sendall(lie)
                    heard.append(_read(connection)[NONCE_BYTES:])
            silent.append(socket.create_connection(at, timeout=1.0))
        if len(silent) > MAX_STRANGERS // 2:
            silent.pop(0).close()
    for connection in silent:
        connection.close()


def _read(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionError):  # the store closes a connection whose lie it has not read to its end
        while part := connection.recv(4096):
            received += part
    return received
