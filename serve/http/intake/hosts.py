"""Host names as requests and options have them, and what they tell of who may mean this machine."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

from ....config import UserError

_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that public DNS does not hold."""
_NAME = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII)


def host_name(header: bytes) -> str:
    """The name in a ``Host`` header, or in the authority of a URL: lower case, without the port,
    the brackets of an IPv6 address and a dot at the end."""
    text = header.decode("latin-1").strip().lower()
    name, _, port = text.rpartition(":")
    if name and port.isdigit() and (":" not in name or name.endswith("]")):
        text = name
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return text.removesuffix(".")


def is_private(name: str) -> bool:
    """Whether no page of the internet can have this host name: an IP address, a name without a dot,
    or one that public DNS does not hold.  A page cannot rebind such a name to another machine."""
    if _address(name) is not None:
        return True
    return _NAME.fullmatch(name) is not None and ("." not in name or name.endswith(_PRIVATE))


def is_named(name: str, allowed: tuple[str, ...]) -> bool:
    """Whether a host name is one of those that are allowed: "*" is any, and "*.example.com" all
    names that end so."""
    return any(
        each in ("*", name) or (each.startswith("*.") and name.endswith(each[1:]))
        for each in allowed
    )


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a server that is bound to an address."""
    ip = _address(address)
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip is not None and ip.is_loopback


def checked_hosts(hosts: list[str]) -> tuple[str, ...]:
    """The values of ``--allowed-host`` as ``is_named`` compares them.

    Raises:
        UserError: one is no host name.
    """
    names = []
    for each in hosts:
        name = host_name(each.encode())
        if _address(name) is None and _NAME.fullmatch(name) is None:
            raise UserError(
                f"allowed_host={each!r}: expected a host name without scheme and path, such as "
                "llm.example.com or *.example.com"
            )
        names.append(name)
    return tuple(names)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
