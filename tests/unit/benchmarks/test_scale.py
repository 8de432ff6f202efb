"""The model in benchmarks/scale.md: its page, its coefficients, and the simulation clock."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale import measure, model
from benchmarks.scale.clock import Clock
from benchmarks.scale.coefficients import content, read
from benchmarks.scale.model import LIMITS, MODELS, Step, stops_at
from pipeline.model.families import moe_geometry
from tests import scale_page
from tests.large_models import MODELS as LARGE
from tests.large_models import hf_config


def test_the_pages_tables_are_up_to_date():
    """`make docs` writes the tables."""
    assert scale_page.PAGE.read_text() == scale_page.render()


def test_every_coefficient_is_used_and_has_a_description():
    text = "".join(Path(module.__file__).read_text() for module in (model, scale_page))
    simulated = ("request_s",)
    for kind in ("measured", "assumed"):
        for name, of in content()[kind].items():
            assert of["why"]
            known = name in simulated or f'["{name}"]' in text
            assert known or name in scale_page.ONLY_SHOWN, name


def test_coefficients_from_the_code_equal_its_constants():
    found = content()["measured"]
    assert {name: found[name] for name in measure.of_code()} == measure.of_code()


def test_large_models_have_their_published_shapes():
    large = {scale_page.KEYS[one.name]: one for one in MODELS if one.name in scale_page.KEYS}
    assert len(large) == 3
    for key, one in large.items():
        assert one.weights == pytest.approx(LARGE[key], rel=2e-3)
        geometry = moe_geometry(hf_config(key))
        assert geometry is not None
        assert (one.layers, one.experts, one.topk) == (
            len(geometry.layers),
            geometry.experts,
            geometry.topk,
        )


def test_costs_per_gpu_stay_constant_as_the_cluster_grows():
    """Weak scaling: with 8 times the GPUs, a step takes the same time, and its traces are 8 times
    as large."""
    of = read()
    for one in MODELS:
        small, large = Step(one, 512, of), Step(one, 4096, of)
        assert small.seconds == pytest.approx(large.seconds, rel=0.01)
        assert large.trace_bytes == pytest.approx(8 * small.trace_bytes)
        assert model.export_whole(large) <= model.export_whole(small)
        assert model.seal(large) > 7 * model.seal(small)


def test_a_design_stops_where_its_cost_first_exceeds_its_limit():
    of, one = read(), MODELS[0]
    for limit in LIMITS:
        gpus = stops_at(limit, one, of)
        if gpus is None:
            continue
        step = Step(one, gpus, of)
        assert limit.cost(step) > limit.most(step), limit.design
        before = Step(one, gpus // 2, of)
        assert not before.fits or limit.cost(before) <= limit.most(before), limit.design
    faster = replace(of, assumed=of.assumed | {"request_s": of.assumed["request_s"] / 100})
    seal = next(limit for limit in LIMITS if limit.cost is model.seal_in_turn)
    assert stops_at(seal, one, faster) > stops_at(seal, one, of)


def test_a_difference_is_small_because_most_weights_do_not_change():
    found = measure.of_differences(1 << 16)
    assert 0.005 < found["difference_share"]["value"] < 0.1


def test_parties_run_in_the_order_of_simulated_time():
    clock, seen = Clock(), []

    def party(name, pauses):
        for pause in pauses:
            clock.sleep(pause)
            seen.append((name, round(clock.now)))
        clock.happen(name)

    clock.add("slow", lambda: party("slow", [7, 7]))
    clock.add("fast", lambda: party("fast", [3, 3, 3]))
    clock.add("waits", lambda: (clock.wait("slow"), seen.append(("waits", round(clock.now)))))
    clock.run()
    assert seen == [
        *(("fast", 3), ("fast", 6), ("slow", 7), ("fast", 9), ("slow", 14), ("waits", 14))
    ]


def test_requests_in_a_pool_overlap_but_computation_does_not():
    """In a pool of 16, forty requests of one second each take three rounds. The processor
    time of the code is added to this time."""
    clock, seen = Clock(), []

    def work(number):
        clock.sleep(1.0)
        return number

    def party():
        seen.extend(clock.in_order(work, range(40)))
        clock.sleep(2.0)
        seen.append(clock.now)

    clock.add("one", party)
    clock.run()
    assert seen[:-1] == [*range(40)]
    assert 5.0 <= seen[-1] < 6.5


def test_a_party_that_fails_or_waits_forever_ends_the_simulation():
    clock = Clock()
    clock.add("fails", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clock.run()
    clock = Clock()
    clock.add("waits", lambda: clock.wait("never"))
    with pytest.raises(RuntimeError, match="never"):
        clock.run()
