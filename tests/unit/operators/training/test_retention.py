"""Which policies and checkpoints are removed, and what a restart finds."""

from hypothesis import given
from hypothesis import strategies as st

from operators.training.retention import expired, remove_expired
from pipeline.run import keys
from pipeline.run.commit import commit
from pipeline.run.plan import publish_plan
from pipeline.run.restarts import restarts
from pipeline.store import open_store
from tests.samples import make_validation_plan


class TestRetention:
    @given(
        newest=st.integers(0, 60),
        saved=st.sets(st.integers(1, 60)),
        save_freq=st.integers(1, 12),
        staleness=st.integers(0, 1),
    )
    def test_what_a_restart_or_a_rollout_needs_is_kept(self, newest, saved, save_freq, staleness):
        """Losing the newest checkpoint must still leave everything the run needs to go on."""
        checkpoints = {version for version in saved if version <= newest}
        policies, gone = expired(range(newest + 1), checkpoints, checkpoints, save_freq, staleness)
        left = sorted(checkpoints - set(gone))
        assert left == sorted(checkpoints)[-2:]
        restart = left[0] if len(left) == 2 else 0
        needed = {max(0, step - staleness) for step in range(restart, newest + staleness + 1)}
        needed |= set(range(0, newest + 1, save_freq))
        assert not needed & set(policies)
        if len(left) == 2:
            assert set(policies) == set(range(newest + 1)) - needed

    def test_a_restart_begins_at_a_checkpoint_whose_step_is_finished(self, tmp_path):
        """Metrics are a step's last commit: without them its checkpoint does not count, neither to
        begin at nor as one of the two that are kept."""
        store = open_store(str(tmp_path))
        for version in (1, 2, 3):
            commit(store, keys.checkpoint(version), {"version": version}, "aa")
        assert restarts(store) == []
        for step in (0, 1):
            commit(store, keys.metrics(step), {}, "aa")
        assert restarts(store) == [1, 2]
        assert remove_expired(store, save_freq=1, max_staleness=0) == ([], [])

    def test_prune_deletes_commits_and_files(self, tmp_path):
        store = open_store(str(tmp_path))
        for version in range(9):
            store.create(keys.policy_file(version, "aa", "model.safetensors"), b"x")
            commit(store, keys.policy(version), {"version": version}, "aa")
        for version in (2, 4, 6):
            store.create(keys.checkpoint_file(version, "aa", "__0_0.distcp"), b"x")
            commit(store, keys.checkpoint(version), {"version": version}, "aa")
            commit(store, keys.metrics(version - 1), {}, "aa")
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([1, 3], [2])
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([], [])
        left = {info.key.split("/")[1] for info in store.list("policies/")}
        assert left == {f"{version:06d}" for version in (0, 2, 4, 5, 6, 7, 8)}
        assert [info.key for info in store.list("checkpoints/000002/")] == []
        assert store.size(keys.checkpoint(4)) is not None

    def stored(self, folder):
        """Policies 0 to 6, checkpoints 4 and 6 of finished steps."""
        store = open_store(str(folder))
        for version in range(7):
            store.create(keys.policy_file(version, "aa", "model.safetensors"), b"x")
            commit(store, keys.policy(version), {"version": version}, "aa")
        for version in (4, 6):
            commit(store, keys.checkpoint(version), {"version": version}, "aa")
            commit(store, keys.metrics(version - 1), {}, "aa")
        return store

    def test_an_interrupted_prune_is_resumed(self, tmp_path):
        """The commit went, the files did not: the next call finds the folder without it. Files that
        are newer than what a restart needs stay: their commit may still come."""
        store = self.stored(tmp_path)
        for version in (1, 5):
            store.delete(keys.policy(version))
        for version in (2, 8):
            store.create(keys.checkpoint_file(version, "aa", "__0_0.distcp"), b"x")
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([1, 3], [2])
        left = {keys.folder_number(info.key) for info in store.list("policies/")}
        assert left == {0, 2, 4, 5, 6}
        left = {keys.folder_number(info.key) for info in store.list("checkpoints/")}
        assert left == {4, 6, 8}

    def test_a_pending_validation_keeps_its_policy(self, tmp_path):
        """Until the last of its shards is there; then the next call takes it."""
        store = self.stored(tmp_path)
        publish_plan(store, make_validation_plan(version=3))
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([1], [])
        commit(store, keys.validation(3, 0), {}, "aa")
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([], [])
        assert store.size(keys.policy(3)) is not None
        commit(store, keys.validation(3, 1), {}, "aa")
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([3], [])
