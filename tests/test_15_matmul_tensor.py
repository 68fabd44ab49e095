"""Stage 15, matmul_tensor."""

from functools import partial

import pytest
import torch
from matmul_cases import MatmulCases

import stages
from stages.toolkit.verify import relative_error


class TestMatmulTensor(MatmulCases):
    stage = stages.load("15")

    def test_gradients_of_second_order(self):
        """`gradcheck` wants float64, which tensor cores do not take here: against the reference's own."""
        tf32 = partial(self.stage.matmul, tf32=True)
        found = []
        for function, dtype in ((tf32, torch.float32), (self.stage.family.reference, torch.float64)):
            a, b = (x.to(dtype).requires_grad_() for x in self.arguments(self.odd))
            grads = torch.autograd.grad(function(a, b).square().sum(), (a, b), create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), (a, b)))
        for x, reference in zip(*found, strict=True):
            assert relative_error(x, reference) < 3e-3

    def test_tf32_is_rounded_to_nearest(self, device):
        """1 + 2^-11 lies between two values of TF32 and goes up; cutting it would give 1."""
        a, one = torch.full((1, 1), 1 + 2.0**-11, device=device), torch.ones(1, 1, device=device)
        assert self.stage.matmul(a, one, tf32=True).item() == 1 + 2.0**-10
        assert self.stage.matmul(one, a, tf32=True).item() == 1 + 2.0**-10

    @pytest.mark.parametrize(
        ("dtype", "tf32", "error", "words"),
        [
            (torch.float64, False, NotImplementedError, r"stage matmul_tensor takes .*float64; stage 14 .* takes it"),
            (torch.float32, False, NotImplementedError, r"only with tf32=True; stage 14 .* keeps all its bits"),
            (torch.float16, True, ValueError, r"tf32=True rounds float32, but a has torch.float16"),
        ],
        ids=str,
    )
    def test_what_it_does_not_take(self, dtype, tf32, error, words):
        x = torch.ones(2, 2, dtype=dtype)
        with pytest.raises(error, match=words):
            self.stage.matmul(x, x, tf32=tf32)


@pytest.mark.parametrize("number", ["10", "14"])
def test_the_stages_before_have_no_tf32(number):
    with pytest.raises(NotImplementedError, match=r"has no tf32=True; stage 15 \(matmul_tensor\) has it"):
        stages.load(number).matmul(torch.ones(2, 2), torch.ones(2, 2), tf32=True)
