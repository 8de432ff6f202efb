"""Products of bfloat16 matrices in float32, and the processors that need them."""

from collections.abc import Iterator

import pytest
import torch

from operators.cpu.matmul import multiplies_bfloat16, multiply_in_float32


@pytest.fixture
def in_float32() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        multiply_in_float32(library)
        yield


def drawn(*shape: int, seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return made.requires_grad_()


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, w)


SHAPES = {
    "mm": (torch.mm, (33, 64), (64, 48)),
    "matmul": (torch.matmul, (5, 7, 64), (64, 48)),
    "linear": (linear, (5, 7, 64), (48, 64)),
    "bmm": (torch.bmm, (6, 33, 32), (6, 32, 17)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_products_and_their_gradients_are_rounded_once(in_float32: None, name: str):
    """The gradients of a product are two other products, which are rounded once too."""
    product, *shapes = SHAPES[name]
    left, right = (drawn(*shape, seed=i) for i, shape in enumerate(shapes))
    found = product(left, right)
    wide = [tensor.detach().float().requires_grad_() for tensor in (left, right)]
    expected = product(*wide)
    gradient = drawn(*found.shape, seed=2).detach()
    torch.autograd.backward(found, gradient)
    torch.autograd.backward(expected, gradient.float())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())
    for narrow, reference in zip((left, right), wide, strict=True):
        assert narrow.grad is not None
        assert reference.grad is not None
        assert torch.equal(narrow.grad, reference.grad.bfloat16())


@pytest.mark.parametrize(
    ("add", "shapes"),
    [
        (torch.addmm, ((48,), (33, 64), (64, 48))),
        (torch.baddbmm, ((6, 33, 17), (6, 33, 32), (6, 32, 17))),
    ],
)
def test_a_sum_with_a_product_is_rounded_once(in_float32: None, add, shapes):
    tensors = [drawn(*shape, seed=i).detach() for i, shape in enumerate(shapes)]
    found = add(*tensors, beta=0.5, alpha=0.25)
    expected = add(*(tensor.float() for tensor in tensors), beta=0.5, alpha=0.25)
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_products_of_other_types_stay_the_same(dtype: torch.dtype):
    left, right = ((8 * drawn(33, 33, seed=i).detach()).to(dtype) for i in range(2))
    expected = left @ right
    with torch.library._scoped_library("aten", "IMPL") as library:
        multiply_in_float32(library)
        found = left @ right
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_the_registration_ends():
    """Other tests in this process must get torch's own products."""
    left, right = (drawn(512, 512, seed=i).detach() for i in range(2))
    before = left @ right
    with torch.library._scoped_library("aten", "IMPL") as library:
        multiply_in_float32(library)
        assert torch.equal(left @ right, (left.float() @ right.float()).bfloat16())
    assert torch.equal(left @ right, before)


@pytest.mark.parametrize(
    ("processor", "limit", "native"),
    [
        ({"avx2": True}, None, False),
        ({"avx512_f": True, "avx512_vnni": True}, None, False),
        ({"avx512_f": True, "avx512_bf16": True}, None, True),
        ({"avx512_f": True, "amx_bf16": True}, None, True),
        ({"avx512_bf16": True}, "ALL", True),
        ({"avx512_bf16": True}, "AVX512_CORE_BF16", True),
        ({"avx512_bf16": True}, "AVX2", False),
        ({"avx512_bf16": True}, "avx512_core_vnni", False),
        ({"avx2": True}, "AVX512_CORE_BF16", False),
    ],
)
def test_the_processor_and_onednns_limit_decide(processor, limit, native):
    environment = {} if limit is None else {"ONEDNN_MAX_CPU_ISA": limit}
    assert multiplies_bfloat16(processor, environment) is native
