"""The sequences of packed micro-batches, as Megatron receives them."""

import numpy as np
import torch

from operators.training.batches.micro_batch import Contents, lay_out
from operators.training.megatron.schedules import _sequences
from tests.unit.operators.training.batches.test_layout import make_sample, placed


def test_the_longest_sequence_of_a_pack_is_not_its_row():
    """Given the length of the row, Megatron would select the wrong rotary embeddings."""
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", 4, G) for i, G in enumerate((5, 21, 9))}
    where, ids = placed(samples, packed=True)
    batch = lay_out(where, ids, Contents(samples))
    found = _sequences(batch, torch.device("cpu"))
    assert found.max_seqlen_q == found.max_seqlen_kv == 24 < batch.tokens_BM.shape[1]
    assert found.cu_seqlens_q.tolist()[:4] == np.cumsum([0, 8, 24, 12]).tolist()
    assert found.cu_seqlens_q_padded is None
