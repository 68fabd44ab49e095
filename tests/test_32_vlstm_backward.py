"""Stage 32, vlstm_backward."""

from importlib import import_module

import pytest
import torch
from vlstm_cases import VlstmGradientCases, gradients

import stages
from stages.families import FLOATING, vlstm
from stages.toolkit import xray

backward_cost = import_module("stages.32_vlstm_backward.stage").backward_cost


class TestVlstmBackward(VlstmGradientCases):
    stage = stages.load("32")

    def test_there_are_no_states_and_it_says_who_has_them(self):
        arguments = self.arguments(self.small)
        for options in ({"initial_state": ()}, {"return_last_state": True}):
            with pytest.raises(NotImplementedError, match=f"no {next(iter(options))}.*; stage 36 has it"):
                self.stage.vlstm(*arguments, **options)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", [(1, 2, 64, 64, 128), (2, 1, 192, 128, 64), (1, 1, 128, 192, 64)], ids=str)
    def test_counts_of_the_backward_equal_their_closed_forms(self, sizes, dtype):
        arguments = self.arguments(sizes, dtype, requires_grad=True)
        for function in self.functions(dtype):
            output = function(*arguments)
            with xray.recording() as report:
                torch.autograd.grad(output, arguments, self.random_grad(arguments))
            assert report.counts() == backward_cost(*sizes, itemsize=dtype.itemsize)
            assert [str(fault) for fault in report.faults] == []

    def test_the_diagonal_hides_nothing(self, device):
        """Where gates are closed E[t, t] outweighs all other E by far, and df is made of the others."""
        for forget in (-10, -30, -60):
            given = self.arguments((1, 2, 130, 8, 8), device=device)
            given[4][:] = forget + 0.1 * given[4]
            grad = self.random_grad(given)
            truth = gradients(vlstm.reference, [x.double() for x in given], grad.double())[5]
            result = gradients(self.stage.vlstm, given, grad)[5]
            assert ((result - truth).norm() / truth.norm()).item() <= 1e-5
