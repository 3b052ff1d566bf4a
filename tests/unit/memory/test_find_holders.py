"""The variable that holds a storage is named, wherever it is kept; nothing of the user's runs for it, and nothing is changed by it."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import gc
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdebug_magics.memory.found import find_holders

if TYPE_CHECKING:
    from collections.abc import Callable


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def mymod(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the user's; what a case plants in it is held by nothing else."""
    module = types.ModuleType("mymod")
    monkeypatch.setitem(sys.modules, "mymod", module)
    return module


class Plain:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def method(self) -> None: ...


class Tree:
    def __init__(self, held: object) -> None:
        self.leaf = held  # kept in the object itself: no dict of attributes is made


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value + 1)
        ctx.factor = value * 2
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def coroutine(held: object) -> Any:
    async def steps() -> object:
        mine = held
        await asyncio.sleep(0)
        return mine

    made = steps()
    made.send(None)
    return made


def error(held: object) -> BaseException:
    def fails() -> None:
        big = held
        raise ValueError(len(str(type(big))))

    try:
        fails()
    except ValueError as raised:
        return raised.with_traceback(raised.__traceback__.tb_next)
    raise AssertionError


def local(held: object) -> threading.local:
    made = threading.local()
    made.mine = held
    return made


def array(held: torch.Tensor) -> Any:
    return held.numpy()


def objects(held: object) -> Any:
    import numpy as np

    made = np.empty(2, dtype=object)
    made[1] = held
    return made


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda held: [0, held], "[1]"),
    "deque": (lambda held: collections.deque([1, held]), "[1]"),
    "coroutine": (coroutine, " local 'mine'"),
    "threading.local": (local, ".mine"),
    "array": (array, ".base"),
    "array of objects": (objects, ".<Tensor>"),
    "storage": (lambda held: [held.untyped_storage()], "[0]"),
}


def plant(module: types.ModuleType, make: Callable[[Any], Any]) -> int:
    held = torch.ones(4)
    module.x = make(held)
    return address(held)


@pytest.mark.parametrize("case", PLACES)
def test_each_kind_of_holder_is_named(case: str, mymod: types.ModuleType) -> None:
    make, written = PLACES[case]
    wanted = plant(mymod, make)
    held = find_holders([wanted])
    written = written.format(line=_line_of_error(), hook=_key(getattr(mymod.x, "_forward_hooks", None)), key=_key(_hooks(mymod.x)))
    assert held.paths == {wanted: f"mymod.x{written}"}
    assert held.holdings[wanted].others == ()
    assert held.is_whole
    if case == "coroutine":
        mymod.x.close()


def _line_of_error() -> int:
    return next(one.co_firstlineno + 2 for one in error.__code__.co_consts if isinstance(one, types.CodeType))


def _hooks(value: object) -> Any:
    return value._backward_hooks if isinstance(value, torch.Tensor) else None


def _key(hooks: Any) -> object:
    return next(iter(hooks), None) if hooks else None


# --- training --------------------------------------------------------------------------------------------------------------------


def train(module: types.ModuleType) -> dict[str, int]:
    module.net = net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False))
    module.opt = opt = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    opt.step()
    return {
        "weight": address(net[0].weight),
        "grad": address(net[1].weight.grad),
        "state": address(opt.state[net[1].weight]["exp_avg"]),
    }


def test_parameters_have_their_module_path_and_the_optimizer_is_a_further_holder(mymod: types.ModuleType) -> None:
    wanted = train(mymod)
    held = find_holders(wanted.values())
    assert held.paths[wanted["weight"]] == "mymod.net.0.weight"
    assert held.paths[wanted["grad"]] == "mymod.net.1.weight.grad"
    assert held.paths[wanted["state"]] == "mymod.opt.state[...]['exp_avg']"
    assert held.holdings[wanted["grad"]].others == ("mymod.opt",)
    assert held.holdings[wanted["state"]].others == ()


def keep_loss(module: types.ModuleType, shape: int = 3) -> int:
    activation = torch.ones(shape, requires_grad=True) * 2
    module.losses = [(activation**2).mean()]
    return address(activation)


def test_what_a_graph_saved_is_named_by_its_node(mymod: types.ModuleType) -> None:
    wanted = keep_loss(mymod)
    assert find_holders([wanted]).paths == {wanted: "mymod.losses[0].grad_fn -> PowBackward0.saved_self"}


def test_a_graph_that_a_backward_pass_gave_back_holds_nothing(mymod: types.ModuleType) -> None:
    wanted = keep_loss(mymod)
    mymod.losses[0].backward()
    assert find_holders([wanted]).paths == {}


def test_a_function_of_the_users_holds_by_its_ctx(mymod: types.ModuleType) -> None:
    mymod.out = Twice.apply(torch.ones(3, requires_grad=True))
    wanted = {address(mymod.out.grad_fn.factor): ".factor", address(mymod.out.grad_fn.saved_tensors[0]): ".saved_tensors[0]"}
    assert find_holders(wanted).paths == {one: f"mymod.out.grad_fn{path}" for one, path in wanted.items()}


def test_what_an_unpack_hook_would_make_is_not_made(mymod: types.ModuleType) -> None:
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: Plain(kept=one.clone()), unpacked.append):
        mymod.out = torch.ones(3, requires_grad=True).exp()
    wanted = address(mymod.out.grad_fn._raw_saved_result.data.kept)
    assert find_holders([wanted]).paths == {wanted: "mymod.out.grad_fn.saved_result.kept"}
    assert not unpacked


def test_a_chain_of_ten_thousand_nodes_is_walked_and_written_short(mymod: types.ModuleType) -> None:
    def chain() -> int:
        start = torch.ones(2, requires_grad=True) * 2
        mymod.total = start.exp()
        for _ in range(10_000):
            mymod.total = mymod.total + 1
        return _saved_at_the_end(mymod.total)

    wanted = chain()
    held = find_holders([wanted])
    assert held.paths[wanted] == "mymod.total.grad_fn -> AddBackward0 -> … -> ExpBackward0.saved_result"
    assert held.is_whole


def _saved_at_the_end(total: torch.Tensor) -> int:
    node = total.grad_fn
    while node.name() != "ExpBackward0":
        node = node.next_functions[0][0]
    return address(node._raw_saved_result.data)


def test_a_list_of_lists_of_lists_is_written_short(mymod: types.ModuleType) -> None:
    held = torch.ones(2)
    wanted = address(held)
    for _ in range(2_000):
        held = [held]
    mymod.x = held
    del held
    path = find_holders([wanted]).paths[wanted]
    assert path.startswith("mymod.x[0][0]")
    assert "…" in path
    assert len(path) < 100


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_bsc])
def test_a_sparse_tensor_holds_its_parts(layout: torch.layout, mymod: types.ModuleType) -> None:
    dense = torch.eye(4)
    mymod.x = dense.to_sparse(layout=layout, **({"blocksize": (2, 2)} if layout is torch.sparse_bsc else {})).requires_grad_()
    with torch.no_grad():
        parts = [mymod.x._values(), mymod.x._indices()] if layout is torch.sparse_coo else [mymod.x.values()]
    wanted = [address(part) for part in parts]
    del parts
    assert find_holders(wanted).paths == dict.fromkeys(wanted, "mymod.x")


def test_strange_tensors_are_passed_by(mymod: types.ModuleType) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    mymod.strange = [
        torch.ones(3, device="meta"),
        fake,
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        nn.UninitializedParameter(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch._efficientzerotensor(3),
        *([torch.ones(3).to_mkldnn()] if torch.backends.mkldnn.is_available() else []),
        jagged,
    ]
    wanted = address(jagged.values())
    del jagged, fake
    held = find_holders([wanted])
    assert held.paths[wanted].startswith(f"mymod.strange[{len(mymod.strange) - 1}].")
    assert held.is_whole


# --- roots -----------------------------------------------------------------------------------------------------------------------


def test_the_local_of_a_running_call_is_named() -> None:
    def train() -> Any:
        losses = [torch.ones(2)]
        return address(losses[0]), find_holders([address(losses[0])])

    wanted, held = train()
    assert held.paths == {wanted: "train() local 'losses'[0]"}


def test_the_local_of_a_call_in_another_thread_is_named() -> None:
    begun, end, found = threading.Event(), threading.Event(), []

    def work() -> None:
        batch = torch.ones(2)
        found.append(address(batch))
        begun.set()
        end.wait()

    thread = threading.Thread(target=work, name="loader")
    thread.start()
    begun.wait()
    try:
        held = find_holders(found)
    finally:
        end.set()
        thread.join()
    assert list(held.paths.values()) == ["work() local 'batch' in thread 'loader'"]


def test_what_outlives_its_object_in_a_finalizer_is_named() -> None:
    owner = Plain()

    def plant() -> int:
        kept = torch.ones(2)
        weakref.finalize(owner, len, kept)
        return address(kept)

    wanted = plant()
    assert find_holders([wanted]).paths == {wanted: "weakref.finalize of len[1][0]"}


def test_a_context_variable_is_named() -> None:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("current")

    def inside() -> Any:
        variable.set([torch.ones(2)])
        wanted = address(variable.get()[0])
        return wanted, find_holders([wanted])

    wanted, held = contextvars.Context().run(inside)
    assert held.paths == {wanted: "contextvar current[0]"}


def test_the_last_error_of_the_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant() -> int:
        kept = torch.ones(2)
        monkeypatch.setattr(sys, "last_traceback", error(kept).__traceback__, raising=False)
        return address(kept)

    wanted = plant()
    assert find_holders([wanted]).paths == {wanted: f"sys.last_traceback -> fails:{_line_of_error()} 'big'"}


def test_an_error_that_is_being_handled_is_named() -> None:
    def fails() -> None:
        big = torch.ones(2)
        raise ValueError(address(big))

    try:
        fails()
    except ValueError as raised:
        wanted = raised.args[0]
        del raised
        held = find_holders([wanted])
    assert held.paths[wanted].startswith("exception in flight -> fails:")
    assert held.paths[wanted].endswith("'big'")


def test_the_nearest_is_named_and_among_equals_a_variable_before_a_module(mymod: types.ModuleType) -> None:
    held = torch.ones(2)
    mymod.x, mymod.a = held, [[held]]
    found = find_holders([address(held)])
    assert list(found.paths.values()) == [
        f"{test_the_nearest_is_named_and_among_equals_a_variable_before_a_module.__name__}() local 'held'"
    ]
    assert found.holdings[address(held)].others == ("mymod.x", "mymod.a")


def test_further_roots_may_be_given(mymod: types.ModuleType) -> None:
    def made() -> tuple[str, object]:
        return "the cell's result", [torch.ones(2)]

    root = made()
    wanted = address(root[1][0])
    found = find_holders([wanted], extra_roots=iter([root]))
    assert found.paths == {wanted: "the cell's result[0]"}
    assert found.holdings[wanted].others == (f"{test_further_roots_may_be_given.__name__}() local 'root'",)


def test_a_function_does_not_hold_the_globals_it_could_use(mymod: types.ModuleType) -> None:
    space = {"__name__": "elsewhere", "big": torch.ones(2)}
    exec("def f(): return big", space)
    mymod.f, wanted = space.pop("f"), address(space["big"])
    path = find_holders([wanted]).paths[wanted]
    assert "local 'space'['big']" in path


# --- nothing of the user's runs ----------------------------------------------------------------------------------------------------


def refuse(*_: object, **__: object) -> Any:
    msg = "code of the user's ran"
    raise AssertionError(msg)


class NastyList(list):
    __iter__ = __len__ = __getitem__ = __bool__ = __eq__ = __repr__ = refuse


class NastyMeta(type):
    __instancecheck__ = __subclasscheck__ = __hash__ = __eq__ = refuse

    __getattr__ = __len__ = __iter__ = __repr__ = refuse


NASTY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda held: NastyList((held,)), "[0]"),
}


@pytest.mark.parametrize("case", NASTY)
def test_no_code_of_the_users_runs(case: str, mymod: types.ModuleType) -> None:
    make, written = NASTY[case]
    wanted = plant(mymod, make)
    held = find_holders([wanted])
    assert held.paths == {wanted: f"mymod.x{written}"}
    assert held.is_whole


def test_a_class_whose_class_refuses_is_no_obstacle(mymod: types.ModuleType) -> None:
    def make(held: object) -> object:
        made = object.__new__(type.__call__(NastyMeta, "Odd", (), {}))
        object.__setattr__(made, "held", held)
        return made

    wanted = plant(mymod, make)
    assert find_holders([wanted]).paths == {wanted: "mymod.x.held"}


def test_a_library_in_a_module_is_not_touched(mymod: types.ModuleType) -> None:
    import ctypes

    mymod.library = ctypes.CDLL(None)
    mymod.x = [torch.ones(2)]
    before = dict(mymod.library.__dict__)
    assert list(find_holders([address(mymod.x[0])]).paths.values()) == ["mymod.x[0]"]
    assert mymod.library.__dict__ == before


# --- nothing is changed ------------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_alive_and_nothing_is_freed(mymod: types.ModuleType) -> None:
    train(mymod)
    keep_loss(mymod)
    for name, (make, _) in PLACES.items():
        if name != "coroutine":
            setattr(mymod, name, make(torch.ones(5)))

    def state() -> Any:
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.layout is torch.strided]
        return sorted((id(one), sys.getrefcount(one), torch._C._storage_Use_Count(one.untyped_storage()._cdata)) for one in tensors)

    find_holders([0])  # what torch makes once, and keeps
    before = state()
    counts, enabled = gc.get_threshold(), gc.isenabled()
    find_holders([one[0] for one in before])
    assert state() == before
    assert (gc.get_threshold(), gc.isenabled()) == (counts, enabled)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        find_holders([])
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_a_running_call_keeps_nothing_that_it_let_go() -> None:
    big = torch.ones(2)
    alive = weakref.ref(big)
    find_holders([address(big)])
    del big
    assert alive() is None


def test_a_call_that_failed_keeps_nothing_more(mymod: types.ModuleType) -> None:
    mymod.x = error(torch.ones(2))
    frame = mymod.x.__traceback__.tb_frame
    before = len(gc.get_referents(frame))
    find_holders([address(next(one for one in gc.get_referents(frame) if isinstance(one, torch.Tensor)))])
    left = [one for one in gc.get_referents(frame) if type(one) is dict and "big" in one]
    assert not left
    assert len(gc.get_referents(frame)) <= before + 1  # the emptied snapshot of Python before 3.13


def test_the_locals_that_the_user_asked_for_stay_as_they_are() -> None:
    big = torch.ones(2)
    mine = locals()
    find_holders([address(big)])
    assert mine["big"] is big


def test_no_dict_is_made_for_objects_on_the_way(mymod: types.ModuleType) -> None:
    mymod.x = [Tree(number) for number in range(100)]
    find_holders([0])
    made = [one for tree in mymod.x for one in gc.get_referents(tree) if type(one) is dict]
    assert not made


def test_a_caller_that_has_ended_is_held_by_the_error_of_a_call(mymod: types.ModuleType) -> None:
    def outer() -> int:
        big = torch.ones(2)
        try:
            raise ValueError(address(big))
        except ValueError as raised:
            inner(raised)
        return address(big)

    def inner(_: object) -> None:
        try:
            raise KeyError
        except KeyError as raised:
            mymod.kept = raised.with_traceback(raised.__traceback__)

    wanted = outer()
    path = find_holders([wanted]).paths[wanted]
    assert path.startswith("mymod.kept")
    assert path.endswith("'big'")


def test_the_answer_is_words(mymod: types.ModuleType) -> None:
    import pickle

    wanted = plant(mymod, lambda held: [held])
    assert pickle.loads(pickle.dumps(find_holders([wanted]))).paths == {wanted: "mymod.x[0]"}


# --- budget ------------------------------------------------------------------------------------------------------------------------


def test_a_list_of_a_hundred_thousand_objects_is_seen_whole(mymod: types.ModuleType) -> None:
    mymod.x = [Tree(number) for number in range(100_000)]
    mymod.x[-1].leaf = torch.ones(2)
    held = find_holders([address(mymod.x[-1].leaf)])
    assert list(held.paths.values()) == ["mymod.x[99999].leaf"]
    assert held.is_whole


def test_an_answer_that_is_not_whole_says_so(mymod: types.ModuleType) -> None:
    mymod.x = [Plain(x=number) for number in range(5_000)]
    assert find_holders([0], most_visits=200_000).is_whole
    assert not find_holders([0], most_visits=2_000).is_whole


def test_millions_of_numbers_are_no_objects_but_have_a_price(mymod: types.ModuleType) -> None:
    mymod.x = [0] * 3_000_000
    mymod.z = [torch.ones(2)]
    held = find_holders([address(mymod.z[0])], most_visits=100_000)
    assert not held.is_whole


def test_slices_that_keep_a_whole_tensor() -> None:
    wanted = {name: torch.ones(64, 64) for name in ("few", "half", "array", "whole")}
    kept = {"few": wanted["few"][0], "half": wanted["half"][:40], "array": wanted["array"].numpy()[:3], "whole": wanted["whole"].t()}
    addresses = {name: tensor.untyped_storage()._cdata for name, tensor in wanted.items()}
    wanted.clear()
    found = find_holders(addresses.values(), extra_roots=[("kept", kept)])
    assert {name for name, address in addresses.items() if found.holdings[address].is_sliced} == {"few", "array"}


def test_a_root_that_is_to_be_preferred() -> None:
    near = [torch.ones(4)]
    far = {"a": {"b": near[0]}}
    address = near[0].untyped_storage()._cdata
    near_label, far_label = (f"test_a_root_that_is_to_be_preferred() local '{name}'" for name in ("near", "far"))
    assert find_holders([address]).holdings[address].root == near_label
    assert find_holders([address], first={far_label}).holdings[address].root == far_label
    assert far
