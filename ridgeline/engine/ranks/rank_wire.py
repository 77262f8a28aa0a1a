"""Sockets between rank 0 and the other ranks: ipc on one machine, TCP between machines.

TCP is encrypted, and both sides prove who they are (ZeroMQ's CURVE): rank 0 has a key pair of its own, the ranks of this engine
have another, made for this engine and given to them when they start. A connection without that key is refused.
"""

from __future__ import annotations

import fcntl
import os
import socket as sockets
import struct
from contextlib import suppress
from typing import Any, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ridgeline.engine.ipc import SocketDir

Keys = dict[str, str]                # of a rank: "server", "public", "secret", as Z85 text; empty: none are needed
_SIOCGIFADDR = 0x8915                # of ioctl: an interface's IPv4 address


class Wire(Protocol):
    store: str                       # where ranks meet to exchange tensors (distributed/meet.py)
    keys: Keys

    def bind(self, socket: zmq.Socket[bytes], name: str) -> str:
        """The address to which a rank connects."""

    def close(self) -> None: ...


class LocalWire:
    """Sockets in a directory that only this user can enter."""

    def __init__(self) -> None:
        self._sockets = SocketDir()
        self.store = str(self._sockets.path / "store")
        self.keys: Keys = {}

    def bind(self, socket: zmq.Socket[bytes], name: str) -> str:
        address = self._sockets.address(name)
        socket.bind(address)
        return address

    def close(self) -> None:
        self._sockets.close()


class FarWire:
    """Ports on one address of this machine."""

    def __init__(self, context: zmq.Context[Any], host: str) -> None:
        self._host = host
        self._public, self._secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        self.keys = {"server": self._public.decode(), "public": public.decode(), "secret": secret.decode()}
        self._known = public
        self._gate = ThreadAuthenticator(context)
        self._gate.start()
        self._gate.configure_curve_callback(credentials_provider=self)
        with sockets.socket() as free:
            free.bind((host, 0))
            self.store = f"tcp://{host}:{free.getsockname()[1]}"

    def callback(self, domain: str, key: bytes) -> bool:
        """Called for every connection, with the public key of the other side."""
        return key == self._known

    def bind(self, socket: zmq.Socket[bytes], name: str) -> str:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        return f"tcp://{self._host}:{socket.bind_to_random_port(f'tcp://{self._host}')}"

    def close(self) -> None:
        self._gate.stop()


def connect(socket: zmq.Socket[bytes], address: str, keys: Keys) -> None:
    """On the side of a rank."""
    if keys:
        socket.curve_serverkey = keys["server"].encode()
        socket.curve_publickey, socket.curve_secretkey = keys["public"].encode(), keys["secret"].encode()
    socket.connect(address)


def break_connections(address: str) -> None:
    """End this process's TCP connections to that address, whichever library has them. A machine that cannot be reached any more
    does not end them itself, and gloo would wait for it until its own limit."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), sockets.socket(fileno=os.dup(int(number))) as found:
            if found.family in (sockets.AF_INET, sockets.AF_INET6):
                if found.getpeername()[0].removeprefix("::ffff:") == address:
                    found.shutdown(sockets.SHUT_RDWR)


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; "": none."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as any_socket:
        for _, name in sockets.if_nameindex():
            try:
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:                              # it has none
                continue
            if sockets.inet_ntoa(found[20:24]) == address:
                return name
    return ""
