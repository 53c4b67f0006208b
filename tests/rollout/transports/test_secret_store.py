"""A store answers only who knows its secret, as torch's own store would, and strangers do not disturb a publish."""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import PrefixStore, Store

from rollout.transports import store_server
from rollout.transports.base import GroupChannel, StoreAddress
from rollout.transports.rendezvous import join
from rollout.transports.secret_store import SecretStore
from rollout.transports.store_server import LENGTH, NONCE_BYTES, StoreServer, fields_of, framed, listen, proof
from tests.support.deadline import DEADLINE_S


@pytest.fixture
def server():
    server = StoreServer("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def store(server):
    return SecretStore(server.address, timeout_s=DEADLINE_S)


def read_to_the_end(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(4096):
        received += part
    return received


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_a_frame_holds_its_fields(fields: list[bytes]) -> None:
    frame = framed(fields)
    assert LENGTH.unpack(frame[: LENGTH.size])[0] == len(frame) - LENGTH.size
    assert fields_of(frame[LENGTH.size :]) == fields


@given(st.binary(max_size=40))
def test_other_bytes_are_fields_or_are_refused(body: bytes) -> None:
    with suppress(ValueError):
        assert framed(fields_of(body))[LENGTH.size :] == body


def calls(store: Store) -> list[object]:
    """What a store answers to the calls of process groups."""
    answers: list[object] = [store.check(["a"])]
    store.set("a", "1")
    store.set("b", "two \N{GREEK SMALL LETTER ALPHA}")
    answers += [store.get("a"), store.get("b"), store.check(["a", "b"]), store.check(["a", "c"])]
    answers += [store.add("n", 2), store.add("n", -5), store.add("a", 4), store.get("n")]
    store.wait(["a", "n"], timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        store.wait(["a", "missing"], timedelta(milliseconds=20))
    answers += [store.delete_key("a"), store.delete_key("a"), store.check(["a"])]
    return answers


def test_it_answers_as_the_store_of_torch_does(store: SecretStore) -> None:
    assert calls(store) == calls(dist.HashStore())
    # through the C++ base class, as process groups call it
    assert calls(PrefixStore("group", store)) == calls(PrefixStore("group", dist.HashStore()))


def test_a_waiting_process_gets_a_key_that_another_one_sets(server: StoreServer, store: SecretStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "late")
        SecretStore(server.address, timeout_s=DEADLINE_S).clone().set("late", b"\x00\xff")
        assert waiting.result(DEADLINE_S) == b"\x00\xff"
    with pytest.raises(RuntimeError, match=r"waited 0.02 s in vain for another process to set never, or this"):
        store.wait(["late", "never, or this"], timedelta(seconds=0.02))


def test_a_process_with_another_secret_gets_no_answer_and_sets_no_key(server: StoreServer, store: SecretStore) -> None:
    other = StoreAddress(host="127.0.0.1", port=server.address.port, secret=bytes(32))
    with pytest.raises(RuntimeError, match="it has ended, or has another secret"):
        SecretStore(other, timeout_s=DEADLINE_S).set("a", "1")
    assert server.num_refused == 1 and not store.check(["a"])
    assert server.address.secret.hex() not in repr(server.address) and str(server.address.secret) not in repr(server)


def test_a_proof_cannot_be_used_again_nor_sent_back(server: StoreServer, store: SecretStore) -> None:
    """Each connection has its own random bytes, and both ends prove different things."""
    secret = server.address.secret
    first = socket.create_connection(("127.0.0.1", server.address.port))
    nonces = first.recv(NONCE_BYTES) + bytes(NONCE_BYTES)
    recorded = bytes(NONCE_BYTES) + proof(secret, b"client", nonces)
    first.sendall(recorded)
    assert first.recv(32) == proof(secret, b"store", nonces) != proof(secret, b"client", nonces)
    again = socket.create_connection(("127.0.0.1", server.address.port))
    again.sendall(recorded + framed([b"set", b"a", b"1"]))
    assert len(read_to_the_end(again)) == NONCE_BYTES
    assert server.num_refused == 1 and not store.check(["a"])


def test_a_process_that_does_not_know_the_secret_is_not_taken_for_the_store() -> None:
    with listen("127.0.0.1") as listening, ThreadPoolExecutor(1) as pool:
        address = StoreAddress(host="127.0.0.1", port=listening.getsockname()[1], secret=bytes(32))
        connecting = pool.submit(SecretStore, address, timeout_s=DEADLINE_S)
        connection, _ = listening.accept()
        with connection:
            connection.sendall(bytes(NONCE_BYTES))
            sent = connection.recv(64, socket.MSG_WAITALL)
            connection.sendall(sent[NONCE_BYTES:])  # sends back the client's own proof
            with pytest.raises(RuntimeError, match="does not know the secret of this channel"):
                connecting.result(DEADLINE_S)


STRANGER = """
import socket, sys
from datetime import timedelta
from torch.distributed import TCPStore
port = int(sys.argv[1])
try:
    TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=2)).set("present/0", "1")
except RuntimeError:
    print("torch was refused")
bare = socket.create_connection(("127.0.0.1", port))
bare.sendall(bytes(64) + bytes.fromhex(sys.argv[2]))
received = b""
while part := bare.recv(4096):
    received += part
print(len(received))
"""


def test_a_stranger_gets_nothing_and_the_group_meets_beside_it(
    server: StoreServer, store: SecretStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = server.address.port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(store_server.MAX_STRANGERS // 2)]
    request = framed([b"set", b"present/0", b"stranger"])
    command = [sys.executable, "-c", STRANGER, str(port), request.hex()]
    stranger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert sums(server.address, 3) == [6.0] * 3
    output, _ = stranger.communicate(timeout=DEADLINE_S)
    assert output.splitlines() == ["torch was refused", str(NONCE_BYTES)]
    assert store.get("present/0") == b"1"  # the group's own
    server.close()
    assert [len(read_to_the_end(connection)) for connection in silent] == [NONCE_BYTES] * len(silent)


def test_silent_connections_are_closed_and_give_way_to_others(
    server: StoreServer, store: SecretStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "HANDSHAKE_S", 0.01)
    at = ("127.0.0.1", server.address.port)
    silent = [socket.create_connection(at) for _ in range(2 * store_server.MAX_STRANGERS)]
    assert [len(read_to_the_end(connection)) for connection in silent] == [NONCE_BYTES] * len(silent)
    assert server.num_refused == len(silent)
    monkeypatch.undo()
    SecretStore(server.address, timeout_s=DEADLINE_S).set("a", "1")
    assert store.get("a") == b"1"


def sums(address: StoreAddress, world: int) -> Sequence[float]:
    """Sums of rank + 1 by the ranks of a gloo group that meets at a store."""
    channel = GroupChannel(store=address, source_ranks=tuple(range(world)), num_engine_ranks=0, timeout_s=DEADLINE_S)

    def member(rank: int) -> float:
        number = torch.tensor([rank + 1.0])
        join(channel, rank).allreduce([number]).wait()
        return number.item()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(member, range(world)))


def test_a_closed_store_frees_its_port_and_fails_who_waits(server: StoreServer, store: SecretStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "never")
        time.sleep(0.05)  # most often it waits at the store by now; either order must fail
        server.close()
        with pytest.raises(RuntimeError, match="did not answer a request"):
            waiting.result(DEADLINE_S)
    with socket.create_server(("127.0.0.1", server.address.port)):
        pass
