"""Names of the weights of Megatron's own layers."""

from operators.cpu.layers import bridge_names


def test_local_names_become_those_of_transformer_engine():
    """Transformer Engine fuses a dense layer's norms into the next linear layer.

    It does not fuse the norm before experts. Latent attention keeps its input norm and fuses its
    inner norms.
    """
    dense, moe, latent = (f"decoder.layers.{n}." for n in (0, 1, 0))
    assert bridge_names(
        [
            dense + "input_layernorm.weight",
            dense + "pre_mlp_layernorm.weight",
            dense + "mlp.linear_fc1.weight",
            moe + "pre_mlp_layernorm.weight",
            moe + "self_attention.q_layernorm.weight",
            moe + "mlp.experts.local_experts.12.linear_fc2.weight",
        ]
    ) == {
        dense + "input_layernorm.weight": dense + "self_attention.linear_qkv.layer_norm_weight",
        dense + "pre_mlp_layernorm.weight": dense + "mlp.linear_fc1.layer_norm_weight",
        dense + "mlp.linear_fc1.weight": dense + "mlp.linear_fc1.weight",
        moe + "pre_mlp_layernorm.weight": moe + "pre_mlp_layernorm.weight",
        moe + "self_attention.q_layernorm.weight": moe + "self_attention.q_layernorm.weight",
        moe + "mlp.experts.local_experts.12.linear_fc2.weight": moe
        + "mlp.experts.linear_fc2.weight12",
    }
    assert bridge_names(
        [
            latent + "input_layernorm.weight",
            latent + "self_attention.q_layernorm.weight",
            latent + "self_attention.kv_layernorm.weight",
            latent + "self_attention.linear_kv_up_proj.weight",
        ]
    ) == {
        latent + "input_layernorm.weight": latent + "input_layernorm.weight",
        latent + "self_attention.q_layernorm.weight": latent
        + "self_attention.linear_q_up_proj.layer_norm_weight",
        latent + "self_attention.kv_layernorm.weight": latent
        + "self_attention.linear_kv_up_proj.layer_norm_weight",
        latent + "self_attention.linear_kv_up_proj.weight": latent
        + "self_attention.linear_kv_up_proj.weight",
    }
