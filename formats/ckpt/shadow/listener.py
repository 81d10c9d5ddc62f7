"""Listen for readers, let in those that know the token, and answer each in a thread.

A peer can neither change anything, nor hold the listener for long.
"""

import hmac
import json
import os
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.stores import wire
from ckpt_formats.stores.address import NetworkAddress, listening_socket
from ckpt_formats.stores.wire import FrameKind, PeerGone

MAX_PEERS = 16
"""Connections at the same time. More are closed at once."""
LOGIN_SECONDS = 10.0
"""The time that a peer has for TLS and the proof of the token, together."""


class Listener(ABC):
    """Listens at an address until it is closed."""

    _name = "shadow"
    """What listens, for messages."""
    _max_peers = MAX_PEERS

    def __init__(self, address: NetworkAddress, token: bytes | None = None, tls: ssl.SSLContext | None = None) -> None:
        """Listen at once. `token`: what readers must know; `tls`: certificate and key. Raises as `listening_socket`."""
        self._socket, self.address = listening_socket(address, token, tls)
        self._token, self._tls = token, tls
        self._peers = threading.BoundedSemaphore(self._max_peers)
        threading.Thread(target=self._accept, name="ckpt-shadow-accept", daemon=True).start()

    def close(self) -> None:
        """Accept no more readers. Those that are connected stay until the process ends."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @abstractmethod
    def _answer(self, peer: socket.socket) -> None:
        """Answer a peer that was let in, in a thread of its own."""

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.1)  # for example, too many files are open
                continue
            if not self._peers.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), name="ckpt-shadow-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        """The life of a connection. Whatever a peer sends, only this connection ends."""
        try:
            with suppress(OSError, PeerGone):
                peer.settimeout(LOGIN_SECONDS)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    peer = self._tls.wrap_socket(peer, server_side=True)
                try:
                    self._log_in(peer)
                    self._answer(peer)
                except PeerGone:
                    raise
                except CkptError as error:
                    fields = {"kind": wire.error_name(error), "what": error.what, "hint": error.hint}
                    wire.send(peer, FrameKind.ERROR, json.dumps(fields).encode(), LOGIN_SECONDS)
        finally:
            with suppress(OSError):
                peer.close()
            self._peers.release()

    def _log_in(self, peer: socket.socket) -> None:
        """Raise `UnsupportedError` unless the peer speaks the protocol and knows the token."""
        nonce = os.urandom(wire.NONCE)
        hello = {"protocol": wire.PROTOCOL, "nonce": nonce.hex(), "token": self._token is not None}
        wire.send(peer, FrameKind.HELLO, json.dumps(hello).encode(), LOGIN_SECONDS)
        kind, body = wire.receive(peer, wire.MAX_REQUEST, LOGIN_SECONDS)
        refused = UnsupportedError(f"the token is missing, or is not the {self._name}'s")
        try:
            fields = json.loads(body)
            client_nonce, given = bytes.fromhex(fields["nonce"]), bytes.fromhex(fields["proof"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise refused from None
        if kind is not FrameKind.LOGIN or len(client_nonce) != wire.NONCE:
            raise refused
        if self._token is not None and not hmac.compare_digest(given, wire.proof(self._token, nonce, client_nonce)):
            raise refused
