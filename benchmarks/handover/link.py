"""Three simulated hosts on one machine; the kernel limits their links equally for all formats.

    rollout ──┐
    store   ──┼── bridge       each line: a veth pair whose rate is limited in both directions
    trainer ──┘

A host is a network namespace. Bytes pass through the kernel's entire TCP stack and the token bucket
of `tc`; only the wire and its latency are missing. Limiting the links requires root, `ip` and `tc`.
If no rate is given, all three hosts are 127.0.0.1, without a limit.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NETWORK = 0x40000000
"""The flag CLONE_NEWNET of setns(2)."""


@dataclass(frozen=True)
class Host:
    """A host, i.e. a network namespace. Example: Host('127.0.0.1', None)."""

    address: str
    namespace: str | None
    """Name of the network namespace; None for the machine's own namespace."""

    def enter(self) -> None:
        """Move the calling thread, and everything that it starts later, to this host."""
        if self.namespace is not None:
            with Path("/run/netns", self.namespace).open() as namespace:
                _set(namespace.fileno())

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread to this host for the duration of a block."""
        if self.namespace is None:
            yield
            return
        with Path("/proc/thread-self/ns/net").open() as before:
            self.enter()
            try:
                yield
            finally:
                _set(before.fileno())


@dataclass(frozen=True)
class Hosts:
    """The hosts of a hand-over."""

    rollout: Host
    store: Host
    trainer: Host


def why_not() -> str | None:
    """Return the reason why links cannot be limited here, or None if they can."""
    if os.geteuid() != 0:
        return "limited links require root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"limited links require {' and '.join(missing)} on PATH" if missing else None


@contextlib.contextmanager
def hosts(gbit: int | None) -> Iterator[Hosts]:
    """Create three hosts with links of `gbit` Gbit/s each way, or one unlimited host for None."""
    if gbit is None:
        here = Host("127.0.0.1", None)
        yield Hosts(here, here, here)
        return
    prefix = f"retrace-{secrets.token_hex(3)}"
    bridge = f"{prefix}-bridge"
    with contextlib.ExitStack() as made:
        _namespace(bridge, made)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        found = []
        for number, name in enumerate(("rollout", "store", "trainer"), 1):
            host = Host(f"10.213.7.{number}", f"{prefix}-{name}")
            _namespace(f"{prefix}-{name}", made)
            _connect(host, name, bridge, gbit)
            found.append(host)
        yield Hosts(*found)


def _connect(host: Host, name: str, bridge: str, gbit: int) -> None:
    assert host.namespace is not None
    pair = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _ip("-n", bridge, "link", "add", name, *pair)
    _ip("-n", bridge, "link", "set", name, "master", "bridge", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", host.namespace, "link", "set", device, "up")
    # The bucket holds the bytes that the link transfers in 2 ms, because of the granularity of
    # timers and network offloads.
    bucket = f"{gbit * 250}kb"
    limit = ("root", "tbf", "rate", f"{gbit}gbit", "burst", bucket, "latency", "20ms")
    for namespace, device in ((bridge, name), (host.namespace, "eth0")):
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *limit)


def _namespace(name: str, made: contextlib.ExitStack) -> None:
    _ip("netns", "add", name)
    made.callback(_ip, "netns", "delete", name)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _set(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NETWORK):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
