"""Every row and every total is the same on fakes and for real, and what a plain count by hand says."""

from __future__ import annotations

import gc
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.instruments.shapes.models import CASES, Output, linear, of
from torchdebug_magics.instruments.shapes.forward_table import examine_model

TOTALS = (
    "total_params",
    "trainable_params",
    "buffer_count",
    "total_flops",
    "param_bytes",
    "buffer_bytes",
    "activation_bytes",
    "uncounted_ops",
    "unused",
    "inputs",
)
NEEDS_DATA = {"packed", "numpy_inside", "nested", "quantised", "scripted", "traced_inside"}


def seen(model, *args, real=False, **kwargs):
    return examine_model(model, *args, keywords=kwargs, real=real).report


def by_path(report):
    return {row.path: row for row in report.rows if row.call < 2}


@pytest.fixture(params=CASES)
def named(request):
    torch.manual_seed(0)
    return request.param, *CASES[request.param]()


def test_fake_equals_real(named):
    name, model, args, kwargs = named
    fake = seen(model, *args, **kwargs)
    real = seen(model, *args, real=True, **kwargs)
    assert fake.failure is None, fake.failure
    assert fake.mode == ("real" if name in NEEDS_DATA else "fake"), fake.problems
    assert list(map(astuple, fake.rows)) == list(map(astuple, real.rows))
    assert {name: getattr(fake, name) for name in TOTALS} == {name: getattr(real, name) for name in TOTALS}


def test_the_rows_are_the_calls_that_hooks_see(named):
    name, model, args, kwargs = named
    report = seen(model, *args, **kwargs)
    if name in {"compiled", "compiled_in_place", "compiled_inside", "data_parallel", "functional_gradient"}:
        return  # run through other hands: there hooks see less
    calls: list[Any] = []

    def hook(module, _args, output):
        calls.append((type(module).__name__, tuple(output.shape) if isinstance(output, torch.Tensor) and name != "nested" else None))

    torch.backends.mha.set_fastpath_enabled(False)
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        model(*args, **kwargs)
    finally:
        handle.remove()
        torch.backends.mha.set_fastpath_enabled(True)
    ours = [(row.type, row.output_shapes) for row in report.rows if row.call]
    assert sorted(kind for kind, _ in ours) == sorted(kind for kind, _ in calls)
    outputs = sorted((kind, shape) for kind, shape in calls if shape is not None)
    assert [one for one in outputs if (one[0], (one[1],)) not in ours] == []


def test_each_parameter_is_counted_once(named):
    name, model, args, kwargs = named
    report = seen(model, *args, **kwargs)
    if name == "quantised":
        assert report.total_params == 4 * 8 + 8 + 8 * 2 + 2
    else:
        assert report.total_params == sum(one.numel() for one in {id(one): one for one in model.parameters()}.values())
    registered = [row for row in report.rows if not row.note.startswith("no registered part")]
    assert len(report.rows) - len(registered) == (name == "in_a_plain_list")
    assert report.total_params == sum(row.own_params for row in registered)
    assert report.trainable_params == sum(row.trainable_params for row in registered)


def test_flops_are_torchs_where_torch_counts(named):
    name, model, args, kwargs = named
    if name in {"functional_gradient", "nested", "gradient_inside"}:
        return  # torch's own counter fails on these
    report = seen(model, *args, **kwargs)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # By other kernels than ours: those that torch has formulas for.
        with (
            torch.backends.mkldnn.flags(enabled=False),
            nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert report.total_flops == counter.get_total_flops()
    assert report.total_flops == report.rows[0].flops


def test_saved_bytes_are_those_that_a_hook_sees(named):
    name, model, args, kwargs = named
    kernels_own = {"lstm", "lstm_in_eval", "embedding_bag"}  # of a size of their own
    ours_alone = {
        "compiled",
        "compiled_in_place",
        "compiled_inside",
        "functional_gradient",
        "nested",
        "rows_of_a_data_set",
        "autocast_inside",
    }
    if name in kernels_own | ours_alone:
        return
    report = seen(model, *args, **kwargs)
    held = {one.untyped_storage()._cdata for part in model.modules() for one in (*part.parameters(), *part.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in held:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert report.activation_bytes == sum(one.nbytes() for one in storages.values())
    assert report.activation_bytes == report.rows[0].activation_bytes
    del output


def test_tied_weights_say_with_whom():
    model, args, _ = CASES["tied"]()
    report = seen(model, *args)
    rows = by_path(report)
    assert (rows["embed"].own_params, rows["out"].own_params) == (400, 0)
    assert rows["out"].note == "weight shared with embed"
    assert report.total_params == 400 + 12


def test_unused_modules_are_flagged():
    model, args, _ = CASES["tied"]()
    report = seen(model, *args)
    assert report.unused == ("spare",)
    assert (by_path(report)["spare"].call, by_path(report)["spare"].note) == (0, "unused")
    deep = of(lambda self, x: self.a(x), a=linear(), b=nn.Sequential(nn.Sequential(linear(), linear())))
    report = seen(deep, torch.randn(1, 4))
    assert report.unused == ("b",)
    assert [row.path for row in report.rows if row.note == "unused"] == ["b.0.0", "b.0.1"]


def test_what_is_used_without_a_call_is_not_unused():
    model, args, _ = CASES["by_hand"]()
    report = seen(model, *args)
    notes = {path: row.note for path, row in by_path(report).items()}
    assert report.unused == ()
    assert notes["a"] == notes["b"] == "used, but not called as a module"
    assert notes["several"] == notes["named"] == ""
    attention = seen(*CASES["attention"]()[:1], *CASES["attention"]()[1])
    assert attention.unused == ()
    assert by_path(attention)["out_proj"].own_params == 16 * 16 + 16


def test_calls_are_numbered_and_named_where_they_run():
    model, args, _ = CASES["reused"]()
    rows = seen(model, *args).rows
    assert [(row.path, row.call) for row in rows] == [
        ("", 1),
        ("a", 1),
        ("a", 2),
        ("a", 3),
        ("a", 4),
        ("layers.0", 1),
        ("layers.1", 1),
        ("table.k", 1),
    ]
    assert [row.own_params for row in rows] == [0, 20, 0, 0, 0, 20, 20, 20]
    assert rows[2].note == "called before"


def test_a_shared_module_has_the_name_inside_the_call_that_runs():
    shared = linear()
    model = of(lambda self, x: self.right(self.left(x)), left=nn.Sequential(shared), right=nn.Sequential(nn.ReLU(), shared))
    rows = seen(model, torch.randn(1, 4)).rows
    assert [(row.path, row.call) for row in rows if row.type == "Linear"] == [("left.0", 1), ("right.1", 2)]


def test_nested_outputs_are_named():
    model, args, _ = CASES["gives a dict"]()
    assert seen(model, *args).rows[0].output_names == ("y", "n.z[0]", "n.z[1]")
    model, args, _ = CASES["gives a dataclass"]()
    assert seen(model, *args).rows[0].output_names == ("logits", "hidden[0]", "hidden[2].q")
    assert Output.__dataclass_fields__
    model, args, _ = CASES["gives a named tuple"]()
    assert seen(model, *args).rows[0].output_names == ("first", "second[0]")


def test_a_few_rows_of_a_data_set_count_as_far_as_they_are_given():
    model, args, _ = CASES["rows_of_a_data_set"]()
    assert seen(model, *args).activation_bytes == 2 * 3 * 4 * 4


@pytest.mark.parametrize("name", sorted(NEEDS_DATA - {"quantised", "scripted", "traced_inside"}))
def test_a_forward_that_needs_data_is_run_for_real_and_says_so(name):
    model, args, kwargs = CASES[name]()
    report = seen(model, *args, **kwargs)
    assert report.mode == "real"
    assert [note for note in report.notes if note.startswith("ran on real tensors, as the forward needs data (")]


def test_a_lazy_model_is_sized_on_a_copy():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(3))
    report = seen(model, torch.randn(2, 3, 8, 8))
    assert report.rows[-1].output_shapes == ((2, 3),)
    assert report.total_params == 4 * 3 * 9 + 4 + 4 * 36 * 3 + 3
    assert "lazy modules were sized on a copy" in report.notes
    assert type(model[0]) is nn.LazyConv2d
    assert model[0].has_uninitialized_params()


def test_scripted_parts_count_as_a_whole():
    model, args, _ = CASES["scripted"]()
    report = seen(model, *args)
    assert [(row.own_params, row.note) for row in report.rows] == [(58, "scripted: its submodules are not seen")]
    assert report.unused == ()


def test_torch_func_is_followed_without_what_it_saves():
    model, args, _ = CASES["functional_gradient"]()
    report = seen(model, *args)
    assert report.mode == "fake"
    assert any("torch.func" in note for note in report.notes)


def test_torch_func_in_a_forward_and_around_one_is_as_without_the_magic(observe):
    body = """
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x), vmap(grad(lambda t: self.net(t[None]).sum()))(x)

field, x = Field(), torch.rand(5, 1)
u, slope = field(x)
(u.sum() + slope.sum()).backward()
parameters = dict(field.net.named_parameters())
around = grad(lambda p: functional_call(field.net, p, (x,)).sum())(parameters)
"""
    seen_by = observe("shapes", body)
    assert seen_by.error is None
    assert seen_by.report.failure is None
    assert any("torch.func" in note for note in seen_by.report.notes)
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_meta_weights():
    model = nn.Sequential(nn.Linear(1 << 15, 1 << 15, device="meta"), nn.ReLU())
    report = seen(model, torch.empty(2, 1 << 15))
    assert (report.mode, report.rows[0].output_shapes, report.rows[0].device) == ("meta", ((2, 1 << 15),), "meta")
    assert report.total_params == (1 << 30) + (1 << 15)
    assert model[0].weight.is_meta


class Yields(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x


@pytest.mark.parametrize("real", [False, True])
def test_a_forward_that_yields_is_run_to_its_end(real):
    report = seen(Yields(nn.Linear(6, 8), nn.Linear(8, 2)), torch.randn(5, 6), real=real)
    assert [(row.path, row.output_shapes) for row in report.rows] == [
        ("", ((5, 8), (5, 2))),
        ("layers.0", ((5, 8),)),
        ("layers.1", ((5, 2),)),
    ]
    assert report.rows[0].flops == report.total_flops


def test_a_forward_that_breaks_where_it_yields_did_not_return():
    report = seen(Yields(nn.Linear(6, 8), nn.Linear(6, 2)), torch.randn(5, 6))
    assert [row.note for row in report.rows] == ["did not return", "", "did not return"]
    assert report.failure.module == "layers.1"


def test_of_a_forward_that_yields_for_ever_a_part_is_run():
    class Endless(nn.Module):
        def forward(self, x):
            while True:
                x = x + 1
                yield x

    report = seen(Endless(), torch.zeros(1))
    assert len(report.rows[0].output_shapes) == 1000


def test_deep_and_wide_models():
    deep: nn.Module = linear(2, 2)
    for _ in range(200):
        deep = nn.Sequential(deep)
    report = seen(deep, torch.randn(1, 2))
    assert (len(report.rows), report.rows[-1].depth, report.rows[-1].flops) == (201, 200, 8)
    alias: nn.Module = linear(2, 2)
    for _ in range(60):  # two names a level: twice as many paths with each
        alias = of(lambda self, x: self.a(x), a=alias, b=alias)
    assert len(seen(alias, torch.randn(1, 2)).rows) == 61


def test_a_cycle_of_modules_ends():
    model = of(lambda self, x: self.a(x), a=linear())
    model.a.back = [model]
    assert len(seen(model, torch.randn(1, 4)).rows) == 2
    del model.a.back
    gc.collect()


def test_a_real_run_computes_and_a_fake_one_does_not():
    ran: list[bool] = []

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            ran.append(x.is_cpu and type(x) is torch.Tensor)
            return x.clone()

        @staticmethod
        def backward(_ctx, gradient):
            return gradient

    model = of(lambda _self, x: Custom.apply(x))
    seen(model, torch.randn(2))
    seen(model, torch.randn(2), real=True)
    assert ran in ([], [False, True])


BEYOND = {
    "embedding": lambda self, _: self.table(torch.tensor([10])),
    "embedding_bag": lambda _, ids: nn.functional.embedding_bag(ids + 9, torch.zeros(10, 4) + ids.float().mean()),
    "gather": lambda self, ids: self.table.weight.gather(0, ids[:, :1] + 10),
    "index_select": lambda self, ids: self.table.weight.index_select(1, ids[0] + 4),
    "index": lambda self, ids: self.table.weight[ids + 10],
    "index of two": lambda self, ids: self.table.weight[ids, ids + 3],
    "index from behind": lambda self, ids: self.table.weight[ids - 11],
    "cross_entropy": lambda self, ids: nn.functional.cross_entropy(self.table(ids).flatten(0, 1), ids.flatten() + 3),
}


@pytest.mark.parametrize("name", BEYOND)
def test_indices_beyond_their_table_are_found_without_computing(name):
    model = of(BEYOND[name], table=nn.Embedding(10, 4))
    ids = torch.tensor([[0, 1], [1, 0], [1, 1]])
    with pytest.raises((IndexError, RuntimeError)) as error:
        model(ids)
    report = seen(model, ids)
    assert report.failure is not None
    assert report.failure.error.partition("\n")[0] == f"{type(error.value).__name__}: {str(error.value).partition(chr(10))[0]}"
    assert report.mode == "fake"


WITHIN = {
    "embedding": lambda self, ids: self.table(ids + 7),
    "index from behind": lambda self, ids: self.table.weight[ids - 10],
}


@pytest.mark.parametrize("name", WITHIN)
def test_indices_within_their_table_are_none(name):
    assert seen(of(WITHIN[name], table=nn.Embedding(10, 4)), torch.tensor([[0, 1], [2, 0]])).failure is None


def test_lazy_buffers_are_sized_on_the_copy_too():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3))
    report = examine_model(model, torch.ones(2, 1, 6, 6)).report
    assert report.failure is None
    assert report.rows[-1].output_shapes == ((2, 3),)
    assert type(model[1]) is nn.LazyBatchNorm2d
    assert type(model[1].running_mean) is nn.UninitializedBuffer


@pytest.mark.parametrize("real", [False, True])
def test_an_op_that_takes_a_function_is_followed_and_counted(real):
    class Net(nn.Module):
        def forward(self, x):
            return flex_attention(x, x, x)

    x = torch.randn(2, 4, 16, 8)
    report = examine_model(Net(), x, real=real).report
    assert report.failure is None, report.failure
    assert report.mode == ("real" if real else "fake")
    assert report.rows[0].output_shapes == ((2, 4, 16, 8),)
    assert report.total_flops == 2 * 2 * (2 * 4) * 16 * 16 * 8
