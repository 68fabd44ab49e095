"""Stage 52, selective_scan_backward."""

import importlib
import itertools

import pytest
import torch
from selective_scan_cases import DTYPES, KINDS, NAMES, SelectiveScanCases, allowed, problem
from torch import Tensor

import stages
from stages.families import selective_scan as family
from stages.families import widened
from stages.toolkit import xray

stage = importlib.import_module("stages.52_selective_scan_backward.stage")
OPTIONAL = ("D", "z", "delta_bias", "initial_state")


class TestSelectiveScanBackward(SelectiveScanCases):
    stage = stages.load("52")
    odd = (2, 5, 7, 37)
    small = (2, 3, 2, 5)

    # ---- gradients

    def gradcheck(self, arguments: dict[str, Tensor | None], **options) -> None:
        there = {name: x.requires_grad_() for name, x in arguments.items() if x is not None}

        def function(*tensors):
            return self.stage.function(**dict(zip(there, tensors, strict=True)), return_last_state=True, **options)

        assert torch.autograd.gradcheck(function, tuple(there.values()))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
    @pytest.mark.parametrize("method", family.METHODS)
    def test_gradients_against_differences(self, method, dtype):
        for kind in KINDS:
            arguments = problem((2, 2, 3, 6), dtype, b=kind, c=KINDS[KINDS.index(kind) - 1])
            self.gradcheck(arguments, delta_softplus=True, discretization_method=method)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
    def test_gradients_of_every_option(self, dtype):
        for there in itertools.product((False, True), repeat=4):
            without = tuple(name for name, is_there in zip(OPTIONAL, there, strict=True) if not is_there)
            arguments = problem((1, 2, 2, 4), dtype, without=without)
            self.gradcheck(arguments, delta_softplus=True)
            if arguments["delta_bias"] is None:  # steps that are negative would let states grow
                arguments["delta"] = arguments["delta"].detach().sigmoid()
                self.gradcheck(arguments, delta_softplus=False)

    def test_gradients_of_first_and_second_order(self):
        self.gradcheck(problem(self.small), delta_softplus=True)
        arguments = problem(self.small)
        y = self.stage.function(**{name: x.requires_grad_() for name, x in arguments.items()})
        (grad,) = torch.autograd.grad(y.sum(), arguments["u"], create_graph=True)
        with pytest.raises(NotImplementedError, match="selective_scan_backward has no second derivatives"):
            torch.autograd.grad(grad.sum(), arguments["u"])

    def test_gradients_through_one_result_alone(self, device):
        for seq, method in itertools.product((0, 1, 40, 300), ("mamba", "foh")):
            for which in range(2):
                found = []
                for wide, function in ((False, self.stage.function), (True, family.reference)):
                    given = problem((2, 3, 4, seq), torch.float64, device)
                    given = {name: (widened(x) if wide else x).requires_grad_() for name, x in given.items()}
                    options = dict(delta_softplus=True, return_last_state=True, discretization_method=method)
                    out = function(**given, **options)[which]
                    # The other result has no gradient at all.
                    grads = torch.autograd.grad(out, list(given.values()), torch.ones_like(out), allow_unused=wide)
                    found.append(grads)
                for x, truth in zip(*found, strict=True):
                    torch.testing.assert_close(x, torch.zeros_like(x) if truth is None else truth, rtol=1e-9, atol=1e-9)

    def test_gradients_of_some_arguments_alone(self, device):
        arguments = problem((2, 5, 7, 37), torch.float32, device)
        every = {name: x.detach().requires_grad_() for name, x in arguments.items()}
        whole = dict(zip(every, torch.autograd.grad(self.stage.function(**every, delta_softplus=True).sum(), every.values()), strict=True))
        for name in NAMES:
            given = {n: x.detach().requires_grad_(n == name) for n, x in arguments.items()}
            (grad,) = torch.autograd.grad(self.stage.function(**given, delta_softplus=True).sum(), given[name])  # its stride is 0
            assert torch.equal(grad, whole[name])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gradients_have_their_tensors_dtype_and_shape(self, dtype, device):
        arguments = problem((2, 6, 4, 21), dtype, device, c="grouped")
        for name, x in arguments.items():
            given = {n: t.detach().requires_grad_(n == name) for n, t in arguments.items()}
            (grad,) = torch.autograd.grad(self.stage.function(**given).sum(), given[name])
            assert grad.dtype is x.dtype and grad.shape == x.shape and grad.is_contiguous()

    # ---- how the work is shared

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
    def test_sums_in_other_parts_give_the_same(self, dtype, device, monkeypatch):
        """A block has all channels of a chunk, or some, with those of another share of the same group beside them."""
        for b, c in (("variable", "variable"), ("grouped", "variable"), ("constant", "grouped")):
            arguments = problem((2, 260, 3, 40), dtype, device, b=b, c=c)
            for blocks in (1, 4, 1000):
                monkeypatch.setattr(family, "BLOCKS", dict.fromkeys(family.BLOCKS, blocks))
                self.compare(arguments, allowed(dtype))

    def test_gradients_repeat_bit_for_bit(self, device):
        for b, c in itertools.product(KINDS, KINDS):
            arguments = problem((3, 70, 7, 300), torch.float32, device, b=b, c=c)
            one, two = self.results(arguments), self.results(arguments)
            assert all(torch.equal(one[name], two[name]) for name in one)

    @pytest.mark.parametrize("method", family.METHODS)
    def test_no_faults_over_several_chunks(self, method):
        for states in (5, 33):
            given = {n: x.requires_grad_() for n, x in problem((1, 11, states, 150), torch.float32).items()}
            seen = []
            for schedule in ("forward", "reverse", "random"):
                with xray.recording(schedule, 1) as report:
                    y, last = self.stage.function(
                        **given, delta_softplus=True, return_last_state=True, discretization_method=method
                    )
                    grads = torch.autograd.grad((y, last), list(given.values()), (y.detach(), last.detach()))
                assert [str(fault) for fault in report.faults] == []
                seen.append((y, last, *grads))
            for results in seen[1:]:
                assert all(torch.equal(x, first) for x, first in zip(results, seen[0], strict=True))

    # ---- memory

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_memory_is_that_of_inputs_results_and_gradients(self, dtype, monkeypatch):
        """And a tenth of it. No state of a step is stored but the last of every 128."""
        monkeypatch.setattr(family, "BLOCKS", dict.fromkeys(family.BLOCKS, 2))
        sizes = batch, channels, states, seq = 1, 512, 16, 256
        seen, empty = [], family.operator.empty

        def counting(shape, like, dtype=None):
            result = empty(shape, like, dtype)
            seen.append(result)
            return result

        monkeypatch.setattr(family.operator, "empty", counting)
        arguments = problem(sizes, dtype, without=("z", "initial_state"))
        given = {name: x.requires_grad_() for name, x in arguments.items() if x is not None}
        y, last = self.stage.function(**given, delta_softplus=True, return_last_state=True)
        grads = torch.autograd.grad(y, list(given.values()), torch.ones_like(y))
        size = lambda tensors: sum(x.numel() * x.element_size() for x in tensors)  # noqa: E731
        assert max(x.numel() for x in seen) < batch * channels * states * seq // 8
        needed = size(given.values()) + 2 * size([y]) + size([last]) + size(grads)  # y has a gradient, too
        scratch = size(x for x in seen if x.numel() != y.numel()) - size([last])
        assert scratch <= 0.1 * needed + size(x for x in grads if x.numel() != y.numel())
