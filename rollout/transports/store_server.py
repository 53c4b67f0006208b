"""A store of keys at which the processes of a group meet; it answers only who knows the store's secret. Pure: no torch.

torch's own store answers everybody who reaches its port, and a key says where a process listens. This one proves first
that both ends know the secret, which travels through Ray's authenticated calls and never over the connection:

    store  -> client   32 random bytes
    client -> store    32 random bytes, HMAC-SHA256 of both under the secret
    store  -> client   another HMAC-SHA256 of both

After that a request is a frame of fields: verb, then arguments. Values are bytes; nothing is unpickled.

Invariants: nothing but random bytes is sent before the client has proven itself. At most `MAX_STRANGERS` connections
are open that have not, each for at most `HANDSHAKE_S`, so strangers cannot use up the descriptors of a trainer rank.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Sequence

from rollout.transports.base import StoreAddress

BACKLOG = 2048
"""Connections that wait to be accepted by a store; as many as torch allows."""
SECRET_BYTES = 32
NONCE_BYTES = 32
HANDSHAKE_S = 30.0
"""For which a connection may take to prove that it knows the secret."""
MAX_STRANGERS = 64
"""Most connections that have not proven it; further ones wait to be accepted."""
RETRY_S = 0.2
"""Between two tries to accept a connection."""
MAX_FRAME_BYTES = 1 << 20
"""Longest request or answer; the longest of a group is a list of all keys."""
OK, LATE = b"ok", b"late"
"""First field of an answer; after `LATE` come the keys that were not set in time."""
LENGTH = struct.Struct("!I")

_logger = logging.getLogger(__name__)


def proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    """What `role` (`store` or `client`) sends to prove that it knows the secret; the store's nonce is the first."""
    return hmac.digest(secret, role + nonces, hashlib.sha256)


def framed(fields: Sequence[bytes]) -> bytes:
    """A frame: its length, then each field with its length."""
    body = b"".join(LENGTH.pack(len(field)) + field for field in fields)
    return LENGTH.pack(len(body)) + body


def fields_of(body: bytes) -> list[bytes]:
    """The fields of a frame without its length.

    Raises:
        ValueError: the lengths do not match.
    """
    fields, at = [], 0
    while at < len(body):
        start = at + LENGTH.size
        at = start + int.from_bytes(body[at:start], "big")
        if at > len(body):
            raise ValueError(f"a field ends at byte {at} of a frame of {len(body)}")
        fields.append(body[start:at])
    return fields


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of this node's address `host`, and on no other address."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG)


class StoreServer:
    """A store that listens on a free port of one address, in a thread; it ends by `close`, or with this object."""

    def __init__(self, host: str) -> None:
        """Listen on this node's address `host`, and on no other."""
        listening = listen(host)
        listening.setblocking(False)
        secret = secrets.token_bytes(SECRET_BYTES)
        self.address = StoreAddress(host=host, port=listening.getsockname()[1], secret=secret)
        self._values = _Values(secret)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop, self._values, listening), name="store", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _stop, loop, thread)

    @property
    def num_refused(self) -> int:
        """Connections that were closed because they did not prove that they know the secret."""
        return self._values.num_refused

    def close(self) -> None:
        """Close all connections, and the port."""
        self._end()


def _run(loop: asyncio.AbstractEventLoop, values: "_Values", listening: socket.socket) -> None:
    asyncio.set_event_loop(loop)
    accepting = loop.create_task(values.accept(listening))
    try:
        loop.run_forever()
    finally:
        serving = asyncio.all_tasks(loop)
        for task in serving:
            task.cancel()
        loop.run_until_complete(asyncio.gather(accepting, *serving, return_exceptions=True))
        listening.close()
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


class _Values:
    """The keys, and the answers to requests. All but `num_refused` is used in the loop's thread only."""

    def __init__(self, secret: bytes) -> None:
        self.num_refused = 0
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def accept(self, listening: socket.socket) -> None:
        """Serve every connection that proves itself."""
        loop = asyncio.get_running_loop()
        strangers = asyncio.Semaphore(MAX_STRANGERS)
        serving: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
        while True:
            await strangers.acquire()
            try:
                connection, (peer, *_) = await loop.sock_accept(listening)
                reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_FRAME_BYTES)
            except OSError as error:  # no descriptor is free, or the connection has ended
                _logger.warning("the store of a group accepted no connection: %s", error)
                strangers.release()
                await asyncio.sleep(RETRY_S)
                continue
            task = loop.create_task(self._serve(reader, writer, str(peer), strangers))
            serving.add(task)
            task.add_done_callback(serving.discard)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, strangers: asyncio.Semaphore
    ) -> None:
        try:
            try:
                is_known = await self._knows_secret(reader, writer)
            finally:
                strangers.release()
            if not is_known:
                self._refuse(peer)
            while is_known:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if size > MAX_FRAME_BYTES:
                    raise ValueError(f"a request of {size} bytes, {MAX_FRAME_BYTES} are allowed")
                verb, *fields = fields_of(await reader.readexactly(size))
                writer.write(framed(await self._answer(verb.decode(), fields)))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):  # the process has left its group, or has ended
            pass
        except ValueError:
            _logger.exception("a process sent a request that the store does not understand")
        finally:
            writer.close()

    async def _knows_secret(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                writer.write(nonce)
                answer = await reader.readexactly(NONCE_BYTES + hashlib.sha256().digest_size)
        except (asyncio.IncompleteReadError, OSError):  # also TimeoutError
            return False
        nonces = nonce + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], proof(self._secret, b"client", nonces)):
            return False
        writer.write(proof(self._secret, b"store", nonces))
        return True

    def _refuse(self, peer: str) -> None:
        self.num_refused += 1
        if not self.num_refused & (self.num_refused - 1):  # 1, 2, 4, ...: strangers must not fill the log
            _logger.warning(
                "refused %d connection(s) to a store of the run, the last from %s: they did not know its secret",
                self.num_refused,
                peer,
            )

    async def _answer(self, verb: str, fields: Sequence[bytes]) -> Sequence[bytes]:
        """The answer to a request.

        Raises:
            ValueError: there is no such verb, or its arguments are wrong.
        """
        match verb, fields:
            case "set", [key, value]:
                await self._set(key.decode(), value)
                return [OK]
            case "add", [key, number]:
                total = int(self._values.get(key.decode(), b"0")) + int(number)
                await self._set(key.decode(), str(total).encode())
                return [OK, str(total).encode()]
            case "get", [timeout_s, key]:
                late = await self._wait([key.decode()], float(timeout_s))
                return [LATE, *late] if late else [OK, self._values[key.decode()]]
            case "wait", [timeout_s, *keys]:
                late = await self._wait([key.decode() for key in keys], float(timeout_s))
                return [LATE, *late] if late else [OK]
            case "check", keys:
                return [OK, b"1" if all(key.decode() in self._values for key in keys) else b"0"]
            case "delete", [key]:
                return [OK, b"0" if self._values.pop(key.decode(), None) is None else b"1"]
        raise ValueError(f"{verb} with {len(fields)} argument(s)")

    async def _set(self, key: str, value: bytes) -> None:
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def _wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Wait until all keys are set; returns those that were not in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: all(key in self._values for key in keys))
        except TimeoutError:
            return [key.encode() for key in keys if key not in self._values]
        return []
