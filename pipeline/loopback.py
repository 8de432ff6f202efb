"""Servers on this machine, which are never reached through a proxy."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Return whether a URL names a server on this machine, such as http://127.0.0.1:9000."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
