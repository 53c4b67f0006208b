"""The client of a `StoreServer` as a store of torch.distributed: process groups of torch take it like their own stores.

torch calls it through the base class: gloo while a group is made, NCCL when two ranks meet for the first time. Both do
so in the thread that joins. The Python object must live as long as its group (`rollout.transports.rendezvous.join`).
"""

import hmac
import secrets
import socket
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from rollout.transports.base import StoreAddress
from rollout.transports.store_server import LATE, LENGTH, NONCE_BYTES, fields_of, framed, proof

GRACE_S = 5.0
"""For which the answer of a store may be late after the request's own limit."""


class SecretStore(Store):
    """A connection to a store; one thread at a time uses it."""

    def __init__(self, address: StoreAddress, *, timeout_s: float) -> None:
        """Connect, and prove to each other that both know the secret.

        Raises:
            RuntimeError: nobody listens there, or one end does not know the secret.
        """
        super().__init__()
        self._address = address
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._clones: list[SecretStore] = []
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout=timeout_s)
            weakref.finalize(self, self._socket.close)
            self._prove()
        except OSError as error:
            raise RuntimeError(f"the store at {address.host}:{address.port} does not answer: {error}") from error

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key, for all processes."""
        self._ask("set", key.encode(), value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set.

        Raises:
            RuntimeError: it is not in time.
        """
        return self._ask("get", str(self._timeout_s).encode(), key.encode())[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first; the sum."""
        return int(self._ask("add", key.encode(), str(value).encode())[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return self._ask("check", *(key.encode() for key in keys))[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            RuntimeError: they are not in time; names those that are missing.
        """
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._ask("wait", str(limit_s).encode(), *(key.encode() for key in keys), limit_s=limit_s)

    def deleteKey(self, key: str) -> bool:  # noqa: N802  # torch calls it by this name
        """Remove a key; whether it was set."""
        return self._ask("delete", key.encode())[0] == b"1"

    def clone(self) -> "SecretStore":
        """Another connection to the same store."""
        clone = SecretStore(self._address, timeout_s=self._timeout_s)
        self._clones.append(clone)  # torch holds only the C++ half
        return clone

    def _ask(self, verb: str, *fields: bytes, limit_s: float | None = None) -> Sequence[bytes]:
        """The fields of the answer.

        Raises:
            RuntimeError: the store does not answer, or keys were not set in time.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        try:
            with self._lock:
                self._socket.settimeout(limit_s + GRACE_S)
                self._socket.sendall(framed([verb.encode(), *fields]))
                status, *answer = fields_of(self._read(LENGTH.unpack(self._read(LENGTH.size))[0]))
        except OSError as error:
            where = f"{self._address.host}:{self._address.port}"
            raise RuntimeError(f"the store at {where} did not answer a request ({verb}): {error}") from error
        if status == LATE:
            late = ", ".join(key.decode() for key in answer)
            raise RuntimeError(f"waited {limit_s:g} s in vain for another process to set {late}")
        return answer

    def _prove(self) -> None:
        """Show the store that this process knows the secret, and see that the store does."""
        nonces = self._read(NONCE_BYTES) + secrets.token_bytes(NONCE_BYTES)
        self._socket.sendall(nonces[NONCE_BYTES:] + proof(self._address.secret, b"client", nonces))
        expected = proof(self._address.secret, b"store", nonces)
        if not hmac.compare_digest(self._read(len(expected)), expected):
            raise ConnectionError("it does not know the secret of this channel")

    def _read(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = self._socket.recv(num_bytes - len(parts))
            if not part:
                raise ConnectionError("it closed the connection: it has ended, or has another secret")
            parts += part
        return bytes(parts)
