"""The user's kubectl and helm, bound to one namespace."""

import contextlib
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.patience import PATIENCE_S, eventually

Object = dict[str, Any]


class CommandError(Exception):
    """The failure of a command; the message contains the command's output."""


def command(*arguments: str, timeout_s: float = PATIENCE_S, stdin: str | None = None) -> str:
    """Run a command and return its output. Raises CommandError."""
    done = subprocess.run(
        arguments,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise CommandError(f"{' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def why_no_cluster(kubeconfig: str | None) -> str | None:
    """Return why the tests have no cluster, or None if they have one.

    KUBECONFIG must be set, because the tests must not kill pods in a cluster that is configured
    only in a forgotten ~/.kube/config.
    """
    if kubeconfig is None:
        return "KUBECONFIG is not set; CONTRIBUTING.md shows how to create a cluster"
    missing = [name for name in ("kubectl", "helm") if shutil.which(name) is None]
    if missing:
        return f"not on PATH: {' and '.join(missing)}"
    try:
        command("kubectl", "get", "--raw", "/readyz", "--request-timeout=60s", timeout_s=120)
    except (CommandError, subprocess.TimeoutExpired) as error:
        return f"KUBECONFIG={kubeconfig}: the cluster does not answer: {error}"
    return None


@dataclass(frozen=True)
class Namespace:
    """One namespace of the cluster that KUBECONFIG names."""

    name: str

    def kubectl(
        self, *arguments: str, timeout_s: float = PATIENCE_S, stdin: str | None = None
    ) -> str:
        """Run kubectl in this namespace and return its output. Raises CommandError."""
        line = ("kubectl", "--namespace", self.name, *arguments)
        return command(*line, timeout_s=timeout_s, stdin=stdin)

    def helm(self, *arguments: str, timeout_s: float = 400) -> str:
        """Run helm in this namespace and return its output. Raises CommandError."""
        return command("helm", *arguments, "--namespace", self.name, timeout_s=timeout_s)

    def get(self, kind: str, selector: str = "") -> list[Object]:
        """Return the objects of a kind that match a label selector; by default, all objects."""
        answer = self.kubectl("get", kind, "--selector", selector, "--output", "json")
        items: list[Object] = json.loads(answer)["items"]
        return items

    def secret(self, name: str) -> dict[str, str]:
        """Return the decoded values of a Secret, keyed by name."""
        template = r'{{range $k, $v := .data}}{{$k}}{{"\t"}}{{base64decode $v}}{{"\n"}}{{end}}'
        text = self.kubectl("get", "secret", name, "--output", f"go-template={template}")
        return dict(line.split("\t", 1) for line in text.splitlines())

    def describe_trouble(self) -> str:
        """Return the namespace's pods, Jobs and events, for a test's failure message."""
        parts = []
        for arguments in (
            ("get", "pods", "--output", "wide"),
            ("get", "jobs"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        ):
            with contextlib.suppress(CommandError):
                parts.append("\n".join(self.kubectl(*arguments).splitlines()[-25:]))
        return "\n\n".join(parts)

    @contextlib.contextmanager
    def forward(self, service: str, port: int) -> Iterator[int]:
        """Yield a local port that leads to a Service, even after its pod has been replaced."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            local: int = free.getsockname()[1]
        over = threading.Event()
        running: list[subprocess.Popen[bytes]] = []

        def keep() -> None:
            line = ["kubectl", "--namespace", self.name, "port-forward", f"service/{service}"]
            while not over.is_set():
                process = subprocess.Popen(
                    [*line, f"{local}:{port}"],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                running[:] = [process]
                while process.poll() is None and not over.wait(0.2):
                    pass
                process.kill()
                process.wait()
                over.wait(0.3)

        keeper = threading.Thread(target=keep, name=f"forward {service}")
        keeper.start()
        try:
            eventually(lambda: _accepts(local), lambda: f"port-forward to {service}")
            yield local
        finally:
            over.set()
            keeper.join()


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
