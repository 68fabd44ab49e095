"""The functions that take the fastest stage: which one it is, that it takes what it is given, what the choice costs."""

import doctest
import importlib
import itertools
import pkgutil
import time

import pytest
import scan_cases
import torch

import stages
from stages import families
from stages.families import COMPLEX, FLOATING, axpy, block_memory, matmul, qkv, scan, vlstm, widened
from stages.toolkit import build
from stages.toolkit.verify import outputs, relative_error

FAMILIES = {name: importlib.import_module(f"stages.families.{module}") for name, module in stages.FUNCTIONS.items()}
HALF = (torch.float16, torch.bfloat16)


def meta(*size, dtype=torch.float32, **options):
    return torch.empty(size, dtype=dtype, device="meta", **options)


def results(function, arguments, asked, **options):
    """What a function gives, and the gradients of the arguments at the places `asked`."""
    given = [
        x.detach().requires_grad_(n in asked) if isinstance(x, torch.Tensor) else x for n, x in enumerate(arguments)
    ]
    found = outputs(function(*given, **options))
    assert all(x.requires_grad == bool(asked) for x in found)
    if not asked:
        return list(found)
    grads = torch.autograd.grad(found, [given[n] for n in asked], [x.detach() for x in found])
    return [*(x.detach() for x in found), *grads]


def of_first(family):
    """The options that the first stage of a family is tried with first."""
    return stages.load(family.FASTEST[0]).options()[0]


def agree(family, arguments, expected=None, **options):
    """The chosen stage is the expected one; what comes out is its own, bit for bit, and right.

    Each argument's gradient is asked for alone, too.
    """
    function = getattr(stages, family.NAME)
    choice = function.choose(*arguments, **options)
    assert choice.stage in family.FASTEST and choice.reason
    assert expected is None or choice.stage[:2] == expected
    tensors = [n for n, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
    sizes = dict.fromkeys(family.SIZES, 1100)
    allowed = family.tolerance(sizes, arguments[tensors[0]].dtype, **options)
    if not stages.load(choice.stage).gradients:
        tensors = []
    for asked in ([], tensors, *([n] for n in tensors)):
        found = results(function, arguments, asked, **options)
        own = results(getattr(stages.load(choice.stage), family.NAME), arguments, asked, **options)
        assert all(scan_cases.same(x, y) for x, y in zip(found, own, strict=True))
    found = results(function, arguments, tensors, **options)
    wide = [widened(x) if n in tensors else x for n, x in enumerate(arguments)]
    truths = results(family.reference, wide, tensors, **options)
    # The gradient that comes in is what goes out, so that it is off as well: twice what a result may be.
    assert max(map(relative_error, found, truths)) <= 2 * max(allowed.values())


# ---- which there are


def test_every_family_has_a_function():
    assert sorted(stages.FUNCTIONS.values()) == [module.name for module in pkgutil.iter_modules(families.__path__)]
    for name, family in FAMILIES.items():
        assert family.NAME == name
        assert set(family.FASTEST) <= {stage for stage in stages.names() if stages.load(stage).family is family}
    assert set(stages.FUNCTIONS) <= set(stages.__all__) & set(dir(stages))
    with pytest.raises(AttributeError, match="module 'stages' has no attribute 'sccan'"):
        stages.sccan  # noqa: B018


@pytest.mark.parametrize("name", stages.FUNCTIONS)
def test_what_help_says(name):
    function = getattr(stages, name)
    assert function is getattr(stages, name) and function.__name__ == name
    assert f"`stages.{name}.choose` tells which, and why." in function.__doc__
    assert "Raises:" in function.__doc__ and "stages.load" not in function.__doc__
    (examples,) = doctest.DocTestFinder().find(function, name)
    assert examples.examples and doctest.DocTestRunner().run(examples).failed == 0


# ---- the rules


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        # Channels side by side: strips of 32 of them, 128 or more; or few steps.
        ((8, 2048, 1536), {}, "41"),
        ((1, 65536, 4096), {}, "41"),
        ((1, 65536, 4065), {}, "41"),
        ((1, 65536, 4064), {}, "45"),
        ((128, 65536, 3), {}, "41"),
        ((127, 65536, 3), {"reverse": True}, "45"),
        ((1, 65536, 1024), {}, "45"),
        ((1, 1024, 2), {}, "45"),
        ((1, 1023, 2), {}, "41"),
        # Steps side by side: rows, 264 or more; or few steps.
        ((8, 2048, 1536), {"time_dim": 2}, "44"),
        ((1, 1 << 22, 264), {"time_dim": 2}, "44"),
        ((1, 1 << 22, 263), {"time_dim": 2}, "45"),
        ((1, 1 << 22, 8), {"time_dim": 2, "reverse": True}, "45"),
        ((1, 8192, 8), {"time_dim": 2}, "45"),
        ((1, 8191, 8), {"time_dim": 2}, "44"),
        # A single channel is both.
        ((1, 1 << 22, 1), {"time_dim": 2}, "45"),
        ((1, 1 << 22, 1), {}, "44"),
        ((500, 1 << 22, 1), {}, "44"),
        # Nothing to do
        ((0, 1 << 22, 5), {}, "45"),
        ((5, 0, 5000), {}, "41"),
        ((5, 1 << 22, 0), {"time_dim": 2}, "45"),
    ],
)
def test_the_rule_of_the_scan(sizes, options, expected):
    batch, seq, channels = sizes
    size = sizes if options.get("time_dim", 1) == 1 else (batch, channels, seq)
    for dtype in FLOATING:
        a = meta(*size, dtype=dtype)
        assert stages.scan.choose(a, a, meta(batch, channels, dtype=dtype), **options).stage[:2] == expected
        turned = meta(*(size[i] for i in (0, 2, 1)), dtype=dtype).mT  # the strides of a do not matter, those of h do
        assert stages.scan.choose(turned, turned, **options).stage[:2] == expected
    for dtype in COMPLEX:
        a = meta(*size, dtype=dtype)
        assert stages.scan.choose(a, a, **options) == ("47_scan_complex", "the numbers are complex")


def test_the_rule_of_the_matmul(monkeypatch):
    def of(dtype, **options):
        return stages.matmul.choose(meta(3, 0, dtype=dtype), meta(0, 5, dtype=dtype), **options).stage[:2]

    assert [of(dtype) for dtype in FLOATING] == ["14", "14", "15", "15"]
    assert of(torch.float32, tf32=True) == "15"
    monkeypatch.setattr(matmul, "block_memory", lambda device: 99 << 10)
    assert [of(dtype) for dtype in FLOATING] == ["14"] * 4


def test_the_rule_of_the_matmul_on_a_hopper(monkeypatch):
    class Card:
        major, minor = 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    assert matmul.is_hopper(torch.device("cuda", 0)) and not matmul.is_hopper(torch.device("cpu"))
    Card.major = 10
    assert not matmul.is_hopper(torch.device("cuda", 0))
    monkeypatch.setattr(matmul, "is_hopper", lambda device: True)

    def of(a, b):
        return stages.matmul.choose(a, b).stage[:2]

    for dtype in HALF:
        a, b = torch.ones(5, 24, dtype=dtype), torch.ones(24, 16, dtype=dtype)
        assert of(a, b) == of(a, b.mT.contiguous().mT) == of(b.mT, a.new_ones(24, 8)) == "16"
        odd = [(a, b[:, 1:]), (a[:, 8:], b[8:, :9]), (a[:, ::2], b[::2]), (a[:, 4:20], b[:16]), (a[:, :20], b[:20])]
        assert [of(*pair) for pair in odd] == ["15"] * len(odd)
        assert torch.compile(of, backend="eager")(a, b) == "15"  # it may begin anywhere
        agree(matmul, (a, b), "16")
    for dtype in FLOATING[:2]:
        assert of(torch.ones(8, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)) == "14"


def test_the_rule_of_the_qkv():
    for dtype in FLOATING:
        x = meta(1, 2, 3, 4, dtype=dtype)
        assert [stages.qkv.choose(x, x, x, causal=causal).stage[:2] for causal in (False, True)] == ["22", "23"]


def test_the_rule_of_the_vlstm(monkeypatch):
    def of(x, gate):
        return stages.vlstm.choose(x, x, x, gate, gate).stage[:2]

    for dtype in FLOATING:
        x, gate = meta(1, 2, 3, 4, dtype=dtype), meta(1, 2, 3, dtype=dtype)
        assert of(x, gate) == of(x, meta(1, 2, 3, dtype=dtype, requires_grad=True)) == "33"
    monkeypatch.setattr(vlstm, "block_memory", lambda device: 99 << 10)
    x, gate = meta(1, 2, 3, 4), meta(1, 2, 3)
    differentiable = meta(1, 2, 3, requires_grad=True)
    assert (of(x, gate), of(x, differentiable), of(meta(1, 2, 3, 4, requires_grad=True), gate)) == ("31", "32", "32")
    with torch.no_grad():
        assert of(x, differentiable) == "31"


def test_the_memory_of_a_block(monkeypatch):
    class Small:
        shared_memory_per_block_optin = 99 << 10

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Small)
    assert block_memory(torch.device("cuda", 1)) == 99 << 10 < vlstm.TUNED_MEMORY < matmul.TENSOR_MEMORY
    assert block_memory(torch.device("cpu")) >= matmul.TENSOR_MEMORY


# ---- what is chosen takes it


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", FLOATING + COMPLEX, ids=str)
def test_scans_of_odd_sizes(dtype, device):
    for sizes in itertools.product((0, 1, 33), repeat=3):
        for time_dim in (1, 2):
            agree(scan, scan.make(scan_sizes(sizes), dtype, device, time_dim=time_dim), time_dim=time_dim)


def scan_sizes(sizes):
    return dict(zip(scan.SIZES, sizes, strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("sizes", "time_dim", "expected"),
    [
        ((128, 3, 5), 1, "41"),
        ((1, 1025, 3), 1, "45"),
        ((2, 1100, 33), 1, "45"),
        ((2, 3, 140), 2, "44"),
        ((1, 8195, 2), 2, "45"),
        ((1, 8195, 1), 1, "44"),
    ],
)
def test_scans_by_every_rule(sizes, time_dim, expected, reverse, device):
    for dtype in (torch.float32, torch.bfloat16):
        options = {"time_dim": time_dim, "reverse": reverse}
        a, b, h0 = scan.make(scan_sizes(sizes), dtype, device, **options)
        agree(scan, (a, b, h0), expected, **options)
        agree(scan, (a, b, None), expected, **options)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("view", scan_cases.VIEWS)
def test_scans_of_views(view, device):
    for time_dim, sizes in ((1, (3, 40, 24)), (2, (3, 40, 24)), (1, (1, 1030, 2)), (2, (1, 8200, 1))):
        arguments = scan.make(scan_sizes(sizes), torch.float32, device, time_dim=time_dim)
        agree(scan, [scan_cases.viewed(view, x) for x in arguments], time_dim=time_dim)


def test_scans_of_expanded_tensors(device):
    a, b, h0 = scan.make(scan_sizes((1, 1, 33)), torch.float32, device)
    for sizes in ((3, 5, 33), (2, 1030, 33)):
        agree(scan, (a.expand(sizes), b.expand(sizes), h0.expand(sizes[0], 33)))
        agree(scan, (a.expand(sizes).mT, b.expand(sizes).mT, h0.expand(sizes[0], 33)), time_dim=2)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_products(dtype, device):
    expected = "14" if dtype not in HALF else "15"
    for m, n, k in itertools.product((0, 1, 33), repeat=3):
        a, b = matmul.make({"M": m, "N": n, "K": k}, dtype, device)
        boxes = dtype in HALF and matmul.is_hopper(a.device) and n % 8 == k % 8 == 0
        agree(matmul, (a, b), "16" if boxes else expected)
    for given in ((a.mT.contiguous().mT, b), (a, b.mT.contiguous().mT), (a[:1].expand(33, -1), b[:, :1].expand(-1, 9))):
        agree(matmul, given, expected)
    if dtype is torch.float32:
        agree(matmul, (a, b), "15", tf32=True)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_qkv(dtype, device):
    for sizes in ((1, 2, 33, 5, 70), (2, 1, 1, 1, 1), (1, 1, 3, 0, 5), (1, 1, 0, 4, 4), (0, 1, 3, 4, 4)):
        given = qkv.make(dict(zip(qkv.SIZES, sizes, strict=True)), dtype, device)
        heads_inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
        for arguments in (given, heads_inside, [x[:, :1].expand_as(x) if x.shape[1] else x for x in given]):
            agree(qkv, arguments, "22")
            agree(qkv, arguments, "23", causal=True)
    agree(qkv, qkv.make(dict(zip(qkv.SIZES, (1, 1, 4, 4, 4), strict=True)), dtype, device), "22", scale=0.25)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("memory", [99, 227], ids="{} KiB".format)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_vlstm(dtype, memory, device, monkeypatch):
    monkeypatch.setattr(vlstm, "block_memory", lambda device: memory << 10)
    for sizes in ((1, 2, 33, 5, 70), (2, 1, 1, 1, 1), (1, 1, 3, 0, 5), (1, 1, 0, 4, 4), (0, 1, 3, 4, 4)):
        given = vlstm.make(dict(zip(vlstm.SIZES, sizes, strict=True)), dtype, device)
        for options in ({}, {"input_gate": "sigmoid", "normalize": False}, {"eps": 0.01, "normalizer_gradient": False}):
            with torch.no_grad():
                stages.vlstm(*(x.requires_grad_() for x in given), **options)
            found = results(stages.vlstm, given, range(5), **options)
            own = results(stages.load("33" if memory > 99 else "32").vlstm, given, range(5), **options)
            assert all(scan_cases.same(x, y) for x, y in zip(found, own, strict=True))
            truths = results(vlstm.reference, [x.double() for x in given], range(5), **options)
            assert max(map(relative_error, found, truths)) <= 2 * vlstm.tolerance({}, dtype)["output"]
    with pytest.raises(NotImplementedError, match="stage 36 has it"):
        stages.vlstm(*given, return_last_state=True)


def test_those_of_one_stage(device):
    agree(axpy, (2.0, *axpy.make({"N": 33}, torch.float32, device)[1:]), "00")
    family = FAMILIES["ssm_adaptive_unitary"]
    arguments = family.make(dict(zip(family.SIZES, (1, 5, 7, 33), strict=True)), torch.float32, device)
    agree(family, arguments, "48")
    agree(family, arguments[:-1], "48")
    family = FAMILIES["selective_scan"]
    arguments = family.make(dict(zip(family.SIZES, (1, 5, 7, 33), strict=True)), torch.float32, device)
    agree(family, arguments, "52")
    family = FAMILIES["discretize"]
    for dtype in family.DTYPES:
        sizes = dict(zip(family.SIZES, (2, 5, 3, 7), strict=True))
        agree(family, family.make(sizes, dtype, device), "50", method="foh")
    family = FAMILIES["discretize_matrix"]
    for method in family.METHODS:
        sizes = dict(zip(family.SIZES, (2, 5, 3), strict=True))
        agree(family, family.make(sizes, torch.float32, device, method=method), "53", method=method)
    family = FAMILIES["lstm"]
    for activation in family.ACTIVATIONS:
        sizes = dict(zip(family.SIZES, (5, 3, 4, 7), strict=True))
        agree(family, family.make(sizes, torch.float32, device), activation=activation)


# ---- as the stages' own functions


def test_errors_are_those_of_the_stages_and_come_before_anything_is_built(monkeypatch):
    x, two = torch.ones(2, 3, 4), torch.ones(2, 2)
    cases = {
        "axpy": [((1j, x, x), {}), ((1.0, x, two), {})],
        "lstm": [((x, two, two), {}), ((x, x[0], two), {}), ((x, torch.ones(8, 4), torch.ones(8, 2)), {"zoneout": 2})],
        "matmul": [((two, x), {}), ((two, torch.ones(3, 3)), {}), ((two.half(), two.half()), {"tf32": True})],
        "qkv": [((x, x, x), {}), ((x[None],) * 3, {"scale": "1"})],
        "scan": [
            *(((x, y), {}) for y in (None, two, x.double(), x.mT, x.to("meta"), x.to_sparse())),
            ((x.int(), x.int()), {}),
            ((x, x), {"time_dim": 0}),
            ((x, x), {"time_dim": True}),
            ((x, x), {"reverse": 1}),
            ((x, x, two), {}),
        ],
        "vlstm": [((x[None],) * 3 + (x, x), {"eps": -1.0}), ((x[None],) * 5, {})],
        "selective_scan": [((x,) * 5, {}), ((x, x, two, x, x), {}), ((x, x, x[0], x, x), {"discretization_method": 1})],
        "ssm_adaptive_unitary": [((x,) * 8, {})],
        "discretize": [((x, two), {"method": "zoh"}), ((x, x), {"method": "zhh"}), ((x, x), {"method": 1})],
        "discretize_matrix": [
            ((x[:1], x, x), {"method": "zoh"}),
            ((x, x, x), {"method": "mamba"}),
            ((x, x, 1.0), {"method": "zoh"}),
        ],
    }
    assert set(cases) == set(stages.FUNCTIONS)
    monkeypatch.setattr(build, "ensure", lambda *_: pytest.fail("something is built"))
    for name, calls in cases.items():
        for arguments, options in calls:
            own = getattr(stages.load(FAMILIES[name].FASTEST[0]), name)
            texts = []
            for function in (own, getattr(stages, name), getattr(stages, name).choose):
                with pytest.raises((TypeError, ValueError)) as caught:
                    function(*arguments, **options)
                texts.append((type(caught.value), str(caught.value)))
            assert len(set(texts)) == 1
    with pytest.raises(TypeError, match=r"scan\(\) missing 1 required positional argument: 'b'"):
        stages.scan(x)


def test_what_the_chosen_stage_raises_is_raised(monkeypatch):
    def fail(*names):
        raise stages.BuildError(names[0])

    monkeypatch.setattr(stages.load("41").kernels, "_modules", {})
    monkeypatch.setattr(build, "ensure", fail)
    with pytest.raises(stages.BuildError, match="41_scan_pipelined"):
        stages.scan(torch.ones(1, 2, 3), torch.ones(1, 2, 3))


@pytest.mark.parametrize("name", stages.FUNCTIONS)
def test_compiles_without_a_graph_break(name, device):
    family = FAMILIES[name]
    function, options = getattr(stages, name), of_first(family)
    arguments = family.make(dict(zip(family.SIZES, family.PROBLEMS[1], strict=True)), torch.float32, device, **options)
    differentiable = all(stages.load(stage).gradients for stage in family.FASTEST)
    given = [x.requires_grad_(differentiable) if isinstance(x, torch.Tensor) else x for x in arguments]
    tensors = [x for x in given if isinstance(x, torch.Tensor)]

    def wave(*arguments):
        return outputs(function(*arguments, **options))[0].sin()

    torch.compiler.reset()
    compiled = torch.compile(wave, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*given), wave(*given)
    assert torch.equal(found, expected)
    if not differentiable:
        return
    of = [torch.autograd.grad(x, tensors, torch.ones_like(x), allow_unused=True) for x in (found, expected)]
    for x, y in zip(*of, strict=True):
        assert x is y or torch.equal(x, y)


def test_compiled_code_chooses_anew_where_sizes_change(device):
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b: stages.scan(a, b), fullgraph=True, backend="aot_eager")
    for sizes in ((1, 70, 3), (1, 80, 3), (2, 1500, 3), (1, 1100, 4), (130, 20, 3), (1, 9, 4)):
        a, b, _ = scan.make(scan_sizes(sizes), torch.float32, device)
        assert torch.equal(compiled(a, b), stages.scan(a, b))


def test_the_function_may_be_asked_for_first_in_compiled_code(monkeypatch):
    monkeypatch.delitem(vars(stages), "scan", raising=False)
    torch.compiler.reset()
    a = torch.ones(1, 3, 2)
    assert torch.equal(torch.compile(lambda a: stages.scan(a, a), fullgraph=True, backend="eager")(a), a.cumsum(1))


def test_meta_and_fake_tensors():
    for size in ((2, 5, 3), (1, 2000, 3), (1, 3, 9000)):
        a = meta(*size, requires_grad=True)
        h = stages.scan(a, a, time_dim=1)
        assert h.shape == a.shape and torch.autograd.grad(h.sum(), a)[0].shape == a.shape
    with torch._subclasses.FakeTensorMode():
        x = torch.ones(2, 33, 4)
        assert stages.scan(x, x).shape == x.shape


def test_the_choice_costs_less_than_half_a_call(device):
    def microseconds(call, repeats=200):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats * 1e6

    for name, family in FAMILIES.items():
        function, options = getattr(stages, name), of_first(family)
        empty = family.make(dict.fromkeys(family.SIZES, 0), torch.float32, device, **options)
        own = getattr(stages.load(function.choose(*empty, **options).stage), name)
        own(*empty, **options)
        best = plain = float("inf")
        end = time.perf_counter() + 10
        while not best < 1.5 * plain and time.perf_counter() < end:  # a busy machine makes both slow
            best = min(best, microseconds(lambda: function(*empty, **options)))  # noqa: B023
            plain = min(plain, microseconds(lambda: own(*empty, **options)))  # noqa: B023
        assert best < 1.5 * plain, name
