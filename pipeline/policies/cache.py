"""The copy of a policy version that all engines on a machine share.

    <root>/retrace-policies-<user>-<boot>-<run>/
        lock          shared while an engine reads the copy, exclusive while an engine changes it
        version.json  the copy's version; removed before the first byte changes, and written
                      again after the last byte has changed
        tensors.json  name, dtype, shape and SHA-256 of each of the copy's tensors
        weights/      the copy's files
        host          the host that created the copy; after that host restarts, only it may
                      remove the copy
        engines/<id>  one per engine, locked while the engine lives; contains the newest version
                      that the engine has loaded or skipped

    fetching thread   waits for v+1 ──► changes the copy, once every engine has loaded v
    engine's thread   generates with v ──────────────────────────► loads v+1 from the copy

The copy is changed in place, so a machine needs space for only one version. A worker that needs a
different version, and must not or cannot change the copy, fetches a private copy. The locks use
flock, because the kernel then releases the locks of a killed process. The boot id is part of
the folder's name, because a power failure may leave partly written files.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, cast

from pipeline.policies.fetch import Held, fetch_version
from pipeline.policies.versions import read_version
from pipeline.policies.weights import Tensor
from pipeline.run.commit import canonical, file_list
from pipeline.run.parse import convert
from pipeline.scratch import scratch_folder, this_process
from pipeline.store.base import RefusedError, Store, StoreError

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How many seconds an engine that needs the next version waits for engines that have yet to load
the copy's version. Those engines will load it soon, because every engine generates samples with
that version, and the next version is trained on these samples."""
_PAUSE_S = 0.1
_MEMORY = Path("/dev/shm")
_NAME = "retrace-policies-"


class PolicyTimes(NamedTuple):
    """Seconds spent on the policy of a shard. Example: PolicyTimes(fetch=12.5, stall=1.5)."""

    fetch: float = 0.0
    """Fetching and patching, including time during generation."""
    stall: float = 0.0
    """Time that the engine waited for a version that was already in the store to be fetched and
    loaded."""


def cache_folder(setting: str) -> Path:
    """Return the folder that `store.policy_cache` selects: disk, memory or a path."""
    if setting == "disk":
        return Path(tempfile.gettempdir())
    return _MEMORY if setting == "memory" else Path(setting)


class PolicyCache:
    """One engine's access to its machine's copy. The caller must `close` it."""

    def __init__(self, store: Store, root: Path) -> None:
        self._left = Event()
        self._store = cast(Store, _UntilLeft(store, self._left))
        self._newest = -1
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        run = hashlib.sha256(store.uri.encode()).hexdigest()[:16]
        self._folder = root / f"{_NAME}{os.getuid()}-{boot}-{run}"
        self._fetch_s: dict[int, float] = {}
        # RefusedError, because a restart would not make the folder writable.
        with _storing(f"make the copy of policies in {root}", RefusedError):
            _remove_abandoned(root, self._folder)
            with _locked(self._folder / "lock", fcntl.LOCK_EX):
                (self._folder / "host").write_text(this_process().host)
                (self._folder / "engines").mkdir(exist_ok=True)
                self._engine = self._folder / "engines" / secrets.token_hex(8)
                self._alive = os.open(self._engine, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._alive, fcntl.LOCK_EX)

    @contextmanager
    def held(self, version: int) -> Iterator[Held]:
        """Yield the folder that holds a version. The folder does not change before the block ends.

        Raises ObjectMissingError, CorruptObjectError, and StoreError (for example if the disk is
        full).
        """
        self.needs(version)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self._reading(version) as held:
                if held is not None:
                    yield held
                    return
            if self._is_behind(version) and time.monotonic() < deadline:
                if not self.fetch(version):
                    time.sleep(_PAUSE_S)
                continue
            break
        log.warning(
            "policy %d: the copy in %s holds a different version, which is newer or which another "
            "engine on this machine has yet to load; fetching a private copy",
            version,
            self._folder,
        )
        with scratch_folder("policy") as own:
            yield self._timed(version, own / "weights", larger="set TMPDIR to a larger disk")

    def fetch(self, version: int) -> bool:
        """Change the copy to `version` if possible, and return whether it now holds that version.

        Returns False if the copy is newer, or if another engine has yet to load the copy's version.
        Raises the same errors as `held`. After an error, the copy holds its former version or no
        version.
        """
        with (
            _storing(f"change the copy of policies in {self._folder}"),
            _locked(self._folder / "lock", fcntl.LOCK_EX),
        ):
            mark, before = self._read_mark(), None
            if mark is not None:
                is_of = self._is_of(mark, version)
                if not is_of and (mark.version > version or self._is_needed(mark.version)):
                    return False
                before = self._held(mark)
                if is_of and before is not None:
                    return True
            self._change(version, before)
            return True

    def loaded(self, version: int) -> float:
        """Record that this engine has loaded a version, and return the seconds spent fetching it.

        The result covers all fetches by this engine since it last loaded a version. It is 0 if
        another engine fetched the version. An engine that loads an older version for a validation
        does not load newer versions again: its next step needs the version after the newest one
        that it has loaded.
        """
        self.needs(version + 1)
        fetched = [of for of in self._fetch_s if of <= version]
        return sum(self._fetch_s.pop(of) for of in fetched)

    def needs(self, version: int) -> None:
        """Record that this engine will load no version before `version`, except for validations.

        Without this record, an engine that skips versions would prevent changes to the copy.
        """
        if version - 1 > self._newest:
            self._newest = version - 1
            os.ftruncate(self._alive, 0)
            os.pwrite(self._alive, str(self._newest).encode(), 0)

    def leave(self) -> None:
        """Make a fetch in another thread fail soon, and prevent new fetches."""
        self._left.set()

    def close(self) -> None:
        """End this engine's use of the copy; the last engine removes it."""
        with suppress(OSError):
            self._engine.unlink(missing_ok=True)
            os.close(self._alive)
            _remove_unused(self._folder)

    @contextmanager
    def _reading(self, version: int) -> Iterator[Held | None]:
        """Yield the copy if it holds the version, otherwise None.

        The copy does not change before the block ends.
        """
        with ExitStack() as stack:
            with _storing(f"read the copy of policies in {self._folder}"):
                stack.enter_context(_locked(self._folder / "lock", fcntl.LOCK_SH))
                mark = self._read_mark()
            yield self._held(mark) if mark is not None and self._is_of(mark, version) else None

    def _is_of(self, mark: "_Mark", version: int) -> bool:
        """Return whether the copy holds this version of this run.

        Comparing version numbers does not suffice, because a run may have been removed and created
        again under the same name, and because an attempt may stage another model as policy 0.
        """
        return mark.version == version and mark.identity == self._identity(version)

    def _identity(self, version: int) -> str:
        """Return a digest that identifies a version.

        It is the weights digest or, if that is not recorded, a digest over the version's files.
        """
        policy = read_version(self._store, version)
        files = hashlib.sha256(canonical(file_list(policy.files)).encode()).hexdigest()
        return policy.weights_sha256 or files

    def _held(self, mark: "_Mark") -> Held | None:
        """Return the copy, or None if its list of tensors or its folder was damaged or removed."""
        weights = self._folder / "weights"
        try:
            listed = json.loads((self._folder / "tensors.json").read_bytes())
            tensors = {of[0]: Tensor(of[0], of[1], tuple(of[2]), of[3]) for of in listed}
            if not weights.is_dir():
                raise NotADirectoryError(f"found no folder {weights}")
        except (OSError, LookupError, TypeError, ValueError) as error:
            log.warning("policy %d: its copy in %s is damaged: %s", mark.version, weights, error)
            return None
        return Held(weights, mark.version, mark.weights, tensors)

    def _is_behind(self, version: int) -> bool:
        mark = self._read_mark()
        return mark is None or mark.version <= version

    def _is_needed(self, version: int) -> bool:
        """Return whether another live engine has yet to load the copy's version."""
        for path in (self._folder / "engines").iterdir():
            if path == self._engine:
                continue
            loaded = _loaded_by(path)
            if loaded is not None and loaded < version:
                return True
        return False

    def _change(self, version: int, before: Held | None) -> None:
        path, folder = self._folder / "version.json", self._folder / "weights"
        try:
            held = self._timed(version, folder, before, lambda: path.unlink(missing_ok=True))
        except BaseException:
            if not path.exists():
                shutil.rmtree(folder, ignore_errors=True)  # the disk may be full
            raise
        path.unlink(missing_ok=True)
        (self._folder / "tensors.json").write_text(json.dumps(list(held.tensors.values())))
        temporary = path.with_suffix(".tmp")
        now = _Mark(version, held.weights, self._identity(version))
        temporary.write_text(json.dumps(asdict(now)))
        os.replace(temporary, path)

    def _timed(
        self,
        version: int,
        folder: Path,
        before: Held | None = None,
        begin: Callable[[], object] = lambda: None,
        larger: str = "set store.policy_cache to a larger disk",
    ) -> Held:
        started = time.monotonic()
        found = fetch_version(self._store, version, folder, before, begin, larger)
        seconds = time.monotonic() - started
        self._fetch_s[version] = self._fetch_s.get(version, 0.0) + seconds
        log.info("policy %d fetched in %.1f s", version, seconds)
        return found

    def _read_mark(self) -> "_Mark | None":
        try:
            return convert(json.loads((self._folder / "version.json").read_bytes()), _Mark)
        except (OSError, ValueError):
            return None


class _UntilLeft:
    """A store whose operations all fail once the engine has left the copy."""

    def __init__(self, store: Store, left: Event) -> None:
        self._store = store
        self._left = left

    def __getattr__(self, name: str) -> Any:
        if self._left.is_set():
            raise StoreError("this engine has left the copy of policies")
        return getattr(self._store, name)


@dataclass(frozen=True)
class _Mark:
    """The content of version.json: the version that the copy holds."""

    version: int
    weights: str
    identity: str
    """See `PolicyCache._identity`."""


def _loaded_by(path: Path) -> int | None:
    """Return the newest version that an engine has loaded or skipped.

    Returns -1 if the engine has not loaded or skipped a version yet, and None if it has ended.
    """
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or b"-1")
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return None


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Wait for the lock of a file, and hold it until the block ends.

    If the file is missing, it is created.
    """
    while True:
        _make_private(path.parent)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the last engine removed the folder
            continue
        with closing(os.fdopen(descriptor)):
            fcntl.flock(descriptor, how)
            if _is_file(path, descriptor):
                yield
                return


def _is_file(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can access.

    Raises StoreError if the folder belongs to another user, or if others can access it. Another
    user may have created the folder, because its name can be guessed and all users can write to the
    temporary folder.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
        raise StoreError(
            f"{folder}: found another user's folder, or one that others can access, expected a "
            "folder that only this user can access; remove it, or set store.policy_cache to a "
            "private folder"
        )


def _remove_abandoned(root: Path, own: Path) -> None:
    """Remove the unused copies of this user's other runs on this machine.

    Copies from another boot are removed only if this host created them. On a shared disk, this host
    may not be able to see whether an engine on another host uses a copy.
    """
    same_boot = own.name.rpartition("-")[0]
    for folder in root.glob(f"{_NAME}{os.getuid()}-*"):
        with suppress(OSError):
            if folder != own and (folder.name.startswith(f"{same_boot}-") or _is_ours(folder)):
                _remove_unused(folder)


def _is_ours(folder: Path) -> bool:
    """Return whether this host created a copy. Raises OSError if the copy does not name a host."""
    return (folder / "host").read_text() == this_process().host


def _remove_unused(folder: Path) -> None:
    with (folder / "lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if all(_loaded_by(path) is None for path in (folder / "engines").iterdir()):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _storing(what: str, kind: type[StoreError] = StoreError) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind(
            f"{what}: {error}; free some space, or set store.policy_cache to another place"
        ) from error
