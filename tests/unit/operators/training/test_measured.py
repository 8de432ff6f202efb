"""The values of several ranks combine to metrics."""

import pickle

import numpy as np
import pytest

from operators.training.measured import Measured, mean, reduced, spread
from pipeline.metrics.metric import by_layer, layers_of


def test_each_metric_has_its_own_reduction():
    """A rank may lack a value, or the name as a whole."""
    of_ranks = [
        {"slowest": Measured(max, 1.5), "bytes": Measured(sum, 3), "share": mean(1, 3)},
        {"slowest": Measured(max, None), "bytes": Measured(sum, 4), "share": mean(0, 0)},
        {"slowest": Measured(max, 2.5), "share": mean(3, 5)},
    ]
    sent = [pickle.loads(pickle.dumps(measured)) for measured in of_ranks]
    assert reduced(sent) == {"slowest": 2.5, "bytes": 7, "share": 0.5}


def test_a_metric_that_no_rank_measured_has_no_value():
    nothing = {"seconds": Measured(max, None), "share": mean(0, 0), **spread("a", np.empty(0))}
    names = {"seconds", "share", "a/mean", "a/max", "a/min"}
    assert reduced([nothing, nothing]) == dict.fromkeys(names)
    assert reduced([{}]) == {}


def test_a_spread_covers_the_items_of_all_ranks():
    parts = [[1.0, -2.0], [], [0.5]]
    found = reduced([spread("a", np.array(part, np.float32)) for part in parts])
    assert found == {"a/mean": pytest.approx(-0.5 / 3), "a/max": 1.0, "a/min": -2.0}


def test_pipeline_stages_measure_different_layers():
    stages = [{1: mean(1, 4), 3: mean(2, 4)}, {5: mean(3, 4)}, {5: mean(3, 8)}]
    found = reduced([by_layer("load", layers) for layers in stages])
    assert layers_of(found, "load") == {1: 0.25, 3: 0.5, 5: 0.5}
