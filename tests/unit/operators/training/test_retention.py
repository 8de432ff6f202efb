"""Retention: the trainer removes expired objects and keeps those that a restart needs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from operators.training.retention import expired, remove_expired
from pipeline.run import keys
from pipeline.run.commit import commit
from pipeline.run.plan import publish_plan
from pipeline.run.restarts import restarts
from pipeline.store import open_store
from tests.memory_store import MemoryStore
from tests.samples import make_validation_plan

DIFFERENCE = "difference-00001-of-00001.safetensors"


class TestRetention:
    @given(
        newest=st.integers(0, 60),
        saved=st.sets(st.integers(1, 60)),
        save_freq=st.integers(1, 12),
        staleness=st.integers(0, 1),
    )
    def test_restarts_and_rollouts_find_their_policies(self, newest, saved, save_freq, staleness):
        """Even without the newest checkpoint, the run can continue with the objects that stay."""
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

    def test_a_restart_begins_from_a_checkpoint_whose_step_is_finished(self, tmp_path):
        """A step is finished when its metrics, which are its last commit, exist."""
        store = open_store(str(tmp_path))
        for version in (1, 2, 3):
            commit(store, keys.checkpoint(version), {"version": version}, "aa")
        assert restarts(store) == []
        for step in (0, 1):
            commit(store, keys.metrics(step), {}, "aa")
        assert restarts(store) == [1, 2]
        assert remove_expired(store, save_freq=1, max_staleness=0) == ([], [])

    def stored(self, folder):
        """Store policies 0 to 6, and checkpoints 4 and 6, whose steps are finished."""
        store = open_store(str(folder))
        for version in range(7):
            store.create(keys.policy_file(version, "aa", "model.safetensors"), b"x")
            commit(store, keys.policy(version), {"version": version}, "aa")
        for version in (4, 6):
            commit(store, keys.checkpoint(version), {"version": version}, "aa")
            commit(store, keys.metrics(version - 1), {}, "aa")
        return store

    def test_an_interrupted_removal_is_resumed(self, tmp_path):
        """If a commit was removed but its files were not, the next call removes the files."""
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
        """The first call after the validation's last shard is committed removes the policy."""
        store = self.stored(tmp_path)
        publish_plan(store, make_validation_plan(version=3))
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([1], [])
        commit(store, keys.validation(3, 0), {}, "aa")
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([], [])
        assert store.size(keys.policy(3)) is not None
        commit(store, keys.validation(3, 1), {}, "aa")
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([3], [])

    @given(
        newest=st.integers(8, 40),
        save_freq=st.integers(1, 12),
        staleness=st.integers(0, 2),
        wholes=st.sets(st.integers(1, 40)),
        started=st.integers(1, 40),
    )
    @settings(deadline=None)
    def test_every_version_that_stays_can_be_read(
        self, newest, save_freq, staleness, wholes, started
    ):
        """Exactly the chains of the versions that stay are kept."""
        store = MemoryStore()
        whole = {0, 1, started} | wholes
        for version in range(newest + 1):
            for made, kind in (("aaaaaaaa", version in whole), ("bbbbbbbb", version != started)):
                if made == "aaaaaaaa" or version == started:
                    name = "model.safetensors" if kind else DIFFERENCE
                    store.create(keys.policy_file(version, made, name), b"x")
            store.create(keys.policy_share(version, "aaaaaaaa", 0), b"{}")
            body = {"version": version} | ({} if version in whole else {"difference": {}})
            commit(store, keys.policy(version), body, "aaaaaaaa")
        for version in (newest - 2, newest):
            commit(store, keys.checkpoint(version), {"version": version}, "aa")
            commit(store, keys.metrics(version - 1), {}, "aa")
        gone, _ = remove_expired(store, save_freq, staleness)
        asked, _ = expired(range(newest + 1), (), (newest - 2, newest), save_freq, staleness)
        left = {keys.folder_number(info.key) for info in store.list("policies/")}
        needed = set()
        for version in set(range(newest + 1)) - set(asked):
            needed |= set(range(max(w for w in whole if w <= version), version + 1))
        assert left == needed == set(range(newest + 1)) - set(gone)
        assert remove_expired(store, save_freq, staleness) == ([], [])

    def test_a_difference_in_which_nothing_changed_keeps_its_base(self, tmp_path):
        """The difference has shares but no file."""
        store = self.stored(tmp_path)
        for info in list(store.list("policies/000004/aa/")):
            store.delete(info.key)
        store.create(keys.policy_share(4, "aaaaaaaa", 0), b"{}")
        for info in list(store.list("policies/000000/aa/")):
            store.delete(info.key)
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([1], [])

    def test_files_of_a_dead_writer_do_not_hide_an_empty_difference(self, tmp_path):
        """The dead writer wrote the version whole; the other had no changed tensor to write."""
        store = self.stored(tmp_path)
        for info in list(store.list("policies/000004/")):
            store.delete(info.key)
        store.create(keys.policy_file(4, "bbbbbbbb", "model.safetensors"), b"x")
        store.create(keys.policy_share(4, "aaaaaaaa", 0), b"{}")
        commit(store, keys.policy(4), {"version": 4, "difference": {}}, "aaaaaaaa")
        assert remove_expired(store, save_freq=2, max_staleness=0) == ([1], [])

    def test_a_version_is_removed_before_its_base(self, tmp_path):
        """A reader never finds a difference without its base, even after the trainer is killed."""
        store = self.stored(tmp_path)
        for version in (2, 3):
            store.create(keys.policy_file(version, "aaaaaaaa", DIFFERENCE), b"x")
        deleted: list[str] = []
        delete = store.delete
        store.delete = lambda key: deleted.append(key) or delete(key)
        assert remove_expired(store, save_freq=4, max_staleness=0) == ([1, 2, 3], [])
        versions = [keys.folder_number(key) for key in deleted]
        assert versions == sorted(versions, reverse=True)
