"""Loading of changed tensors: if one tensor has changed, all tensors of its module are loaded."""

from operators.rollout.in_place import layers_of, tensors_to_load

NAMES = [
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.layers.1.mlp.experts.0.up_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.11.mlp.experts.0.up_proj.weight",
    "model.layers.11.mlp.gate.weight",
    "model.norm.weight",
]


def test_all_tensors_of_a_changed_layer_are_loaded():
    """In vLLM, q, k and v are in one module, and so are all experts of a layer."""
    changed = {"model.layers.1.self_attn.q_proj.weight", "model.norm.weight"}
    assert tensors_to_load(NAMES, changed) == [*NAMES[2:5], "model.norm.weight"]
    assert layers_of(changed) == {1}
    assert tensors_to_load(NAMES, NAMES[-2:-1]) == NAMES[5:7]


def test_either_no_tensor_or_every_tensor_may_have_changed():
    assert tensors_to_load(NAMES, []) == []
    assert sorted(tensors_to_load(NAMES, NAMES)) == NAMES
    assert layers_of(NAMES) == {1, 11}
