"""The sockets of a server, which are bound before torch is imported. Standard library only."""

from __future__ import annotations

import errno
import socket


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets for all addresses of the host, bound, so that a port in use is found before a model is loaded.

    Raises OSError with the address.
    """
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            # A server that starts again takes its port, though connections of the last one are still closing.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # Otherwise the socket of "::" would take the port of IPv4 too, which has one of its own.
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # With port 0, all addresses get the port that the first one was given.
            one.bind((address[0], port or sockets[0].getsockname()[1], *address[2:]))
        except OSError as error:
            missing = error
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # the name may have other addresses
                break
            sockets.remove(one)
            one.close()
    else:
        if sockets:
            return sockets
    for one in sockets:
        one.close()
    raise OSError(f"cannot listen on {host}:{port}: {missing}")
