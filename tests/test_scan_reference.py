"""The float64 reference of the scan, and what a user would call instead."""

import pytest
import torch
from scan_cases import GOLDEN, LENGTHS, REAL, WAYS, load_golden

from stages.families import COMPLEX, FLOATING, scan
from stages.toolkit.verify import relative_error

FILES = [*REAL, GOLDEN / "scan_complex_t48.npz"]


def problem(seq: int, dtype: torch.dtype = torch.float64, **options) -> list[torch.Tensor]:
    return list(scan.make({"B": 2, "T": seq, "D": 5}, dtype, **{"time_dim": 1, **options}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_values_and_gradients_of_another_implementation(path):
    golden = load_golden(path)
    for ending, reverse in (("", False), ("_init", False), ("_rev", True)):
        if f"h{ending}" not in golden:
            continue
        given = [golden[name].clone().requires_grad_() for name in ("a", "b", *(["h0"] if ending == "_init" else []))]
        h = scan.reference(*given, time_dim=2, reverse=reverse)
        keys = [f"h{ending}", f"da{ending}", f"db{ending}", "dh0"]
        for key, result in zip(keys, (h.detach(), *torch.autograd.grad(h, given, golden["g"])), strict=False):
            assert relative_error(result, golden[key]) <= 1e-14, key


def test_a_walk_by_hand():
    a, b = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([1.0, 2.0, 4.0])
    h = scan.reference(a[None, :, None], b[None, :, None], torch.tensor([[6.0]]))
    assert h.flatten().tolist() == [4, 3, 10]
    h = scan.reference(a[None, None], b[None, None], torch.tensor([[6.0]]), time_dim=2, reverse=True)
    assert h.flatten().tolist() == [4, 6, 16]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("seq", LENGTHS[:11])
def test_the_incumbent_computes_the_same(seq, way):
    for dtype in (torch.float64, torch.complex128):
        a, b, h0 = problem(seq, dtype, **way)
        for state in (h0, None):
            expected = scan.reference(a, b, state, **way)
            result = scan.incumbent(a, b, state, **way)
            assert result.shape == expected.shape and relative_error(result, expected) <= 1e-13


def test_the_incumbent_compiles_and_has_gradients():
    arguments = [x.requires_grad_() for x in problem(33)]
    torch.compiler.reset()
    compiled = torch.compile(scan.incumbent, fullgraph=True, backend="aot_eager")(*arguments)
    expected = scan.reference(*arguments)
    torch.testing.assert_close(compiled, expected)
    for x, y in zip(*(torch.autograd.grad(h.sum(), arguments) for h in (compiled, expected)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", FLOATING + COMPLEX, ids=str)
def test_problems_have_channels_that_forget_and_channels_that_do_not(dtype):
    for time_dim in (1, 2):
        a, b, h0 = problem(200, dtype, time_dim=time_dim)
        assert a.dtype is b.dtype is h0.dtype is dtype
        assert b.shape == a.shape == ((2, 200, 5) if time_dim == 1 else (2, 5, 200)) and h0.shape == (2, 5)
        size = a.abs().float() if time_dim == 1 else a.abs().float().mT
        assert size[..., ::2].max() <= 0.9922 and size[..., 1::2].min() > 0.99 and size.max() <= 1


def test_an_empty_sequence_gives_gradients_of_zero():
    for way in WAYS:
        arguments = [x.requires_grad_() for x in problem(0, **way)]
        h = scan.reference(*arguments, **way)
        assert h.numel() == 0
        assert not any(x.any() for x in torch.autograd.grad(h.sum(), arguments))
