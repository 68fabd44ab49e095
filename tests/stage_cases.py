"""The tests that every stage has to pass, whatever it computes."""

from functools import partial

import pytest
import torch
from conftest import GPU
from torch import Tensor

from stages.families import FLOATING
from stages.toolkit import xray
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage, load
from stages.toolkit.verify import outputs, verify

SCHEDULES = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2), ("random", 3)]
HEADINGS = ["Problem", "Before", "Idea", "Mapping", "Cost", "Limits", "Needs", "Run"]


@pytest.mark.usefixtures("poisoned")
class StageCases:
    """A stage's test file subclasses this, or its family's subclass of it, and says which stage it is about."""

    stage: Stage
    odd: tuple[int, ...]  # sizes that fit no tile, for the schedules
    small: tuple[int, ...]  # sizes for gradcheck, which calls the function some hundred times
    multiple: int = 1  # of which its sizes have to be multiples

    def arguments(
        self,
        sizes: tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        seed: int = 0,
        requires_grad: bool = False,
        **options,
    ):
        """Random arguments of a problem for a set of options, by default the first, in the stage's own `dtype`.

        `requires_grad=True` asks for the gradients of all tensors.
        """
        self.needs(device)
        dtype = dtype or self.stage.dtype
        options = options or self.stage.options(dtype)[0]
        arguments = self.stage.family.make(self.stage.sizes(sizes), dtype, device, seed, **options)
        return tuple(x.requires_grad_(requires_grad) if isinstance(x, Tensor) else x for x in arguments)

    def check(self, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        """Output and gradients against float64, with every set of options."""
        self.needs(device)
        for options in self.options(dtype):
            results = verify(self.stage, self.stage.sizes(sizes), dtype, device, options=options)
            assert [r for r in results if not r.ok] == []

    def options(self, dtype: torch.dtype | None = None) -> tuple[dict, ...]:
        """The sets of keyword options to try in a dtype, by default the stage's own."""
        dtype = dtype or self.stage.dtype
        if dtype not in self.stage.dtypes:
            pytest.skip(f"this stage does not take {dtype}")
        return self.stage.options(dtype)

    def functions(self, dtype: torch.dtype | None = None) -> list[partial]:
        """The stage's function with each set of options."""
        return [partial(self.stage.function, **options) for options in self.options(dtype)]

    def function(self, *arguments):
        """The stage's function with its first set of options for the arguments' dtype."""
        dtype = next(x.dtype for x in arguments if isinstance(x, Tensor))
        return self.stage.function(*arguments, **self.options(dtype)[0])

    def needs(self, device: str) -> None:
        if why := self.stage.kernels.unable(device):
            pytest.skip(why)

    def needs_xray(self) -> None:
        if self.stage.in_triton:
            pytest.skip("a kernel in Triton has no x-ray")

    # ---- what the kernel's header promises

    def test_header_has_its_sections_in_order(self):
        assert [h for h in HEADINGS if h in self.stage.header] == list(self.stage.header)
        assert {"Problem", "Idea", "Mapping", "Cost", "Limits", "Run"} <= set(self.stage.header)
        assert f"python -m stages run {self.stage.number}" in self.stage.header["Run"]

    def test_gpus_that_it_does_not_run_on_have_another_stage(self):
        instead = self.stage.kernels.instead
        assert (instead is None) == (self.stage.capability is None)
        if instead:
            other = load(instead)
            assert other.name == instead and other.capability is None
            assert other.family is self.stage.family and set(self.stage.dtypes) <= set(other.dtypes)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("factors", [1, 2, 3])
    def test_counts_equal_the_closed_forms(self, factors, dtype):
        self.needs_xray()
        # Multiples of the tile, another one in each size, so that no two sizes can be mistaken for each other.
        sizes = tuple(aligned * (1 + (i + factors) % 3) for i, aligned in enumerate(self.stage.aligned))
        for options in self.options(dtype):
            report = self.stage.xray(*self.arguments(sizes, dtype, **options), **options)
            expected = self.stage.cost(**self.stage.sizes(sizes), itemsize=dtype.itemsize, **options)
            assert isinstance(expected, Counts)
            assert report.counts() == expected
            assert [str(fault) for fault in report.faults] == []

    def test_the_closed_forms_hold_where_the_readme_uses_them(self):
        self.needs_xray()
        sizes = self.stage.bench["cpu"][0]
        assert [size % aligned for size, aligned in zip(sizes, self.stage.aligned, strict=True)] == [0] * len(sizes)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_a_little_more_than_two_tiles(self, dtype, device):
        """However large the kernel's tile is: some in the middle, one at the edge, and inside it almost nothing."""
        self.check(tuple(2 * size + self.multiple for size in self.stage.aligned), dtype, device)

    # ---- on the CPU device, under the x-ray

    def test_no_faults_and_the_same_result_in_every_schedule(self):
        self.needs_xray()
        for options in self.options():
            arguments = self.arguments(self.odd, requires_grad=True, **options)
            tensors = [x for x in arguments if isinstance(x, Tensor)]
            seen = []
            for schedule, seed in SCHEDULES:
                with xray.recording(schedule, seed) as report:
                    results = outputs(self.stage.function(*arguments, **options))
                    grads = [x.detach() for x in results]
                    gradients = torch.autograd.grad(results, tensors, grads) if self.stage.gradients else ()
                assert report.launches
                assert [str(fault) for fault in report.faults] == []
                seen.append([*results, *gradients])
            for results in seen[1:]:
                assert all(torch.equal(x, first) for x, first in zip(results, seen[0], strict=True))

    # ---- as a PyTorch operator

    def test_gradients_of_first_and_second_order(self):
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        arguments = self.arguments(self.small, torch.float64, requires_grad=True)
        for function in self.functions(torch.float64):
            assert torch.autograd.gradcheck(function, arguments)
            assert torch.autograd.gradgradcheck(function, arguments)

    def test_opcheck(self, device):
        operator = getattr(torch.ops.stages, self.stage.operator).default
        for requires_grad in (False, True)[: 1 + self.stage.gradients]:
            torch.library.opcheck(operator, self.arguments(self.odd, device=device, requires_grad=requires_grad))

    def test_compiles_without_a_graph_break(self, device):
        for options in self.options():
            arguments = self.arguments(self.odd, device=device, requires_grad=self.stage.gradients, **options)
            tensors = [x for x in arguments if isinstance(x, Tensor)]

            def wave(*arguments, options=options):
                return tuple(torch.sin(x) for x in outputs(self.stage.function(*arguments, **options)))

            torch.compiler.reset()  # every stage has this code once more, and there is a limit to that
            compiled = torch.compile(wave, fullgraph=True, backend="aot_eager")
            results, expected = compiled(*arguments), wave(*arguments)
            assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
            if self.stage.gradients:
                grads = [torch.ones_like(x) for x in expected]
                for x, y in zip(*(torch.autograd.grad(o, tensors, grads) for o in (results, expected)), strict=True):
                    torch.testing.assert_close(x, y)

    def test_meta_tensors_give_the_shape(self):
        arguments = self.arguments(self.odd)
        meta = [x.to("meta") if isinstance(x, Tensor) else x for x in arguments]
        found, expected = outputs(self.function(*meta)), outputs(self.function(*arguments))
        assert [x.shape for x in found] == [x.shape for x in expected]

    # ---- on a GPU

    @GPU
    def test_current_stream(self):
        arguments = self.arguments(self.odd, device="cuda")
        expected = outputs(self.function(*arguments))
        late = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in arguments]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # the inputs arrive late, on this stream: another would not wait for them
            for x, y in zip(late, arguments, strict=True):
                if isinstance(x, Tensor):
                    x.copy_(y)
            results = outputs(self.function(*late))
        stream.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))

    @GPU
    def test_cuda_graph(self):
        arguments = self.arguments(self.odd, device="cuda")
        self.function(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = outputs(self.function(*arguments))
        for x, y in zip(arguments, self.arguments(self.odd, device="cuda", seed=7), strict=True):
            if isinstance(x, Tensor):
                x.copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(results, outputs(self.function(*arguments)), strict=True))

    @GPU
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_second_gpu(self):
        arguments = self.arguments(self.odd, device="cuda:1")
        assert torch.cuda.current_device() == 0
        first = [x.to("cuda:0") if isinstance(x, Tensor) else x for x in arguments]
        results, expected = outputs(self.function(*arguments)), outputs(self.function(*first))
        assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(results, expected, strict=True))


def same(result: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit but for the sign of zero; NaN counts as equal to NaN."""
    return result.shape == expected.shape and torch.allclose(result, expected, rtol=0, atol=0, equal_nan=True)


def free_gpu_memory() -> float:
    """Bytes that can still be had on the GPU; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0.0
