"""Messages between a scorer and a reward worker: JSON, after their length. A worker runs foreign code, so the scorer
must not unpickle what comes from it.

Ready and then, for each call, Begun and Ended come from the worker. Numbered requests come from the scorer.
"""

import json
import socket
import struct
from asyncio import StreamReader
from dataclasses import asdict, dataclass

from rollout.rewards.call import RewardOutcome, RewardRequest

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A request with the number of its call."""

    number: int
    request: RewardRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker has loaded the reward function."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A worker has received a request; if the worker dies, the call may be the reason."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A call has ended."""

    number: int
    outcome: RewardOutcome
    num_strays: int
    """Processes that the worker's calls had started and left behind, and that were killed."""


Answer = Ready | Begun | Ended


def frame(message: Numbered | Answer) -> bytes:
    """A message as bytes."""
    payload = json.dumps([type(message).__name__, asdict(message)]).encode()
    return _LENGTH.pack(len(payload)) + payload


async def read_answer(reader: StreamReader) -> Answer:
    """The next answer of a worker.

    Raises:
        asyncio.IncompleteReadError: the other side has closed the channel.
        ConnectionError: the message is none of a worker.
    """
    message = _message(await _read(reader))
    if isinstance(message, Numbered):
        raise ConnectionError("a worker has sent a request")
    return message


async def read_request(reader: StreamReader) -> Numbered:
    """The next request of the scorer; errors as for `read_answer`."""
    return _request(await _read(reader))


def _request(payload: bytes) -> Numbered:
    message = _message(payload)
    assert isinstance(message, Numbered), message
    return message


def _message(payload: bytes) -> Numbered | Answer:
    try:
        kind, fields = json.loads(payload)
        match kind:
            case "Numbered":
                return Numbered(number=fields["number"], request=RewardRequest(**fields["request"]))
            case "Ready":
                return Ready(**fields)
            case "Begun":
                return Begun(**fields)
            case "Ended":
                outcome = fields["outcome"]
                details = tuple((str(name), float(value)) for name, value in outcome["details"])
                ended = RewardOutcome(**outcome | {"details": details})
                return Ended(number=fields["number"], outcome=ended, num_strays=fields["num_strays"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConnectionError(f"a message of {len(payload)} bytes cannot be read: {error}") from error
    raise ConnectionError(f"there is no message {kind!r}")


async def _read(reader: StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


def receive_request(channel: socket.socket) -> Numbered | None:
    """The same without an event loop; None if the scorer has closed the channel."""
    head = _receive(channel, _LENGTH.size)
    if head is None:
        return None
    payload = _receive(channel, _LENGTH.unpack(head)[0])
    return None if payload is None else _request(payload)


def _receive(channel: socket.socket, length: int) -> bytes | None:
    received = bytearray()
    while len(received) < length:
        block = channel.recv(length - len(received))
        if not block:
            return None
        received += block
    return bytes(received)
