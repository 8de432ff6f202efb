"""Threads of everything that the tests run in this process: one, and asleep while it waits.

OpenMP reads these when torch is first imported. With threads that spin at its barriers, two busy
processes on two cores slow each other down 5 to 30 times.
"""

import os

import pytest

pytest.register_assert_rewrite("tests.store_conformance")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
