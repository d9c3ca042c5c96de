from __future__ import annotations

import os
import socket

from torch.distributed import HashStore

from millrace.trainers.backends.sockets import GroupSockets


def listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """The caller's end and the listener's."""
    caller = socket.create_connection(listener.getsockname())
    return caller, listener.accept()[0]


def test_only_the_groups_own_connections_are_closed() -> None:
    """A connection that another thread opens meanwhile, and the listening socket, stay."""
    broker, peer = listen(), listen()
    store = HashStore()
    store.set("gloo-ports/1", str(peer.getsockname()[1]))
    group = GroupSockets()
    ours = listen()
    to_peer, from_us = connect(peer)
    to_us, from_peer = connect(ours)
    to_broker, from_client = connect(broker)
    group.record(store, rank=0, world=2)
    assert len(group) == 2
    group.close()
    assert from_us.recv(1) == b""
    assert to_us.recv(1) == b""
    to_broker.sendall(b"x")
    assert from_client.recv(1) == b"x"
    again = connect(ours)
    for one in (broker, peer, ours, to_peer, from_us, to_us, from_peer, to_broker, from_client, *again):
        one.close()


def test_a_reused_descriptor_is_left_alone() -> None:
    group = GroupSockets()
    listener = listen()
    caller, accepted = connect(listener)
    group.record(HashStore(), rank=0, world=1)
    taken = accepted.fileno()
    accepted.close()
    mine, theirs = socket.socketpair()
    if mine.fileno() != taken:
        os.dup2(mine.fileno(), taken)
    group.close()
    theirs.sendall(b"x")
    assert mine.recv(1) == b"x"
    for one in (listener, caller, mine, theirs):
        one.close()
