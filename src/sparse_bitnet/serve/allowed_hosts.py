# SPDX-License-Identifier: Apache-2.0
"""Who may be meant: the Host and Origin of a request against the address that the server listens on.

A page of a stranger can point its own name at this machine's address and then read what it likes from a
server that does not look at the name it was called by. Numbers cannot be pointed elsewhere.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable

from starlette.types import Scope

from sparse_bitnet.errors import UserError
from sparse_bitnet.serve.api_error import ApiError

ANY = "*"
_HOST = re.compile(r"(\[[^][/@\s]+\]|[^][:/@?#\s]+)(:\d*)?")
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_HOST.pattern}|null|\*")
"""As browsers write it; "null" of a page that is a file."""


class AllowedHosts:
    """The names and addresses by which a server is called."""

    def __init__(
        self, listening: str, names: Collection[str] = (), origins: Iterable[str] = ()
    ) -> None:
        """
        Args:
            listening: the address of the socket.
            names: further ones, `ANY` for whatever comes.
            origins: of pages elsewhere that may read the answers, such as https://chat.example; `ANY`.

        Raises `UserError` for what is no name, and for an origin that no browser sends.
        """
        for name in names:
            if name != ANY and not _canonical(name):
                raise UserError(f"--allowed-host {name}: give a name or an address alone")
        self.origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise UserError(f"--cors-origin {origin}: write it as https://chat.example")
        address = ipaddress.ip_address(listening.partition("%")[0])
        self._is_open = ANY in names
        self._names = {_canonical(name) for name in names} | {str(address)}
        self._takes_numbers = address.is_unspecified
        """Listening on all addresses: any of them may be meant."""
        if address.is_loopback or address.is_unspecified:
            self._names |= {"localhost", "127.0.0.1", "::1"}
        if address.is_unspecified:
            self._names.add(_canonical(socket.gethostname()))
        self._names.discard("")

    def check(self, scope: Scope) -> None:
        """Raises `ApiError` for a request that is not meant for this server, or whose end is unclear."""
        headers = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        names = {name for name, _ in headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            # Which of the two counts is where proxies and servers disagree.
            raise ApiError(
                400,
                "Content-Length and Transfer-Encoding together: send one of them",
                headers=_CLOSE,
            )
        host = [value for name, value in headers if name == b"host"]
        called = _canonical(", ".join(host))
        known = self._allows(called) or (self._takes_numbers and _is_number(called))
        if len(host) != 1 or not known:
            raise _refusal("Host", ", ".join(host))
        for name, value in headers:
            if name != b"origin" or value in self.origins or ANY in self.origins:
                continue
            origin = _canonical(value.partition("://")[2])
            # A stranger's page may stand at a number too: only the one that was called is ours.
            if origin != called and not self._allows(origin):
                raise _refusal("Origin", value)

    def _allows(self, name: str) -> bool:
        return self._is_open or name in self._names


_CLOSE = {"Connection": "close"}


def _canonical(host: str) -> str:
    """The one form of a name or an address, without port; "" for what is none."""
    found = _HOST.fullmatch(host.lower())
    name = found[1].strip("[]").rstrip(".") if found else host
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name if found else ""


def _is_number(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _refusal(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"{header} {value[:200]!r} is not one of this server's names: start it with --allowed-host NAME",
        code="host_not_allowed",
        headers=_CLOSE,
    )
