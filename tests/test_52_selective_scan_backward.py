"""Stage 52, selective_scan_backward."""

import importlib
import itertools

import pytest
import torch
from selective_scan_cases import KINDS, SelectiveScanCases, allowed, problem

import stages
from stages.families import selective_scan as family
from stages.toolkit import xray

stage = importlib.import_module("stages.52_selective_scan_backward.stage")


class TestSelectiveScanBackward(SelectiveScanCases):
    stage = stages.load("52")
    odd = (2, 5, 7, 37)
    small = (2, 3, 2, 5)

    @pytest.mark.parametrize("method", family.METHODS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
    def test_gradcheck(self, dtype, method, device):
        """Of every method, all kinds of B and C, with and without what may be left out."""
        optional = ("D", "z", "delta_bias", "initial_state")
        for b, without in itertools.product(KINDS, ((), optional)):
            arguments = problem((1, 2, 2, 5), dtype, device, b=b, c=KINDS[KINDS.index(b) - 1], without=without)
            # A step back in time would be one in which states grow.
            arguments["delta"] = arguments["delta"].sigmoid()
            if not without:
                arguments["delta_bias"] = torch.full_like(arguments["delta_bias"], 0.25)
            names = [name for name, x in arguments.items() if x is not None]
            tensors = [arguments[name].requires_grad_() for name in names]
            for softplus in (True, False):

                def function(*tensors, names=names, softplus=softplus):
                    given = dict(zip(names, tensors, strict=True))
                    options = dict(delta_softplus=softplus, return_last_state=True, discretization_method=method)
                    return self.stage.function(**given, **options)

                assert torch.autograd.gradcheck(function, tensors)

    def test_gradients_of_first_and_second_order(self):
        """There are none of second order, and an error says so."""
        arguments = self.arguments(self.small, torch.float64, requires_grad=True)
        u = arguments[0]
        y, _ = self.function(*arguments)
        (grad,) = torch.autograd.grad(y.sum(), u, create_graph=True)
        with pytest.raises(NotImplementedError, match="selective_scan_backward has no second derivatives"):
            grad.sum().backward()

    @pytest.mark.parametrize("method", ["mamba", "foh", "bilinear"])
    @pytest.mark.parametrize("sizes", [(1, 16, 16, 128), (2, 8, 16, 384), (1, 4, 16, 256)], ids=str)
    def test_sectors_of_the_backward(self, sizes, method):
        arguments = family.make(self.stage.sizes(sizes), torch.float32, discretization_method=method)
        given = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
        results = self.stage.function(*given, discretization_method=method)
        grads = [torch.ones_like(x) for x in results]
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        with xray.recording() as report:
            torch.autograd.grad(results, tensors, grads)
        counts = report.counts()
        batch, channels, _, seq = sizes
        assert (counts.load_sectors, counts.store_sectors) == stage.backward_sectors(batch, channels, seq, method)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64, torch.complex128], ids=str)
    def test_several_launches(self, dtype, device):
        """Of the states that one has no room for; sums over them go on in the next."""
        for without in ((), ("z", "D")):
            for method in ("mamba", "foh"):
                arguments = problem((2, 5, 35, 140), dtype, device, c="grouped", groups=5, without=without)
                self.compare(arguments, allowed(dtype), method=method)

    def test_parts_of_a_share(self, device, monkeypatch):
        """As many blocks share some channels, each more than one or the last one fewer."""
        monkeypatch.setattr(family, "BLOCKS", {"cpu": 6, "cuda": 6})
        for channels in (5, 7):
            for b, c in (("variable", "variable"), ("constant", "variable"), ("variable", "constant")):
                self.compare(problem((1, channels, 5, 40), torch.float64, device, b=b, c=c), allowed(torch.float64))

    def test_many_channels(self, device, monkeypatch):
        """Of which a block of `carry` takes more at a time: 8448 channels are enough."""
        for channels in (8448, 8449):
            arguments = problem((1, channels, 2, 3), torch.float32, device, without=("z",))
            self.compare(arguments, allowed(torch.float32))
