"""A graph as boxes, from reports built by hand: their order, what is folded, and between which of them a cut stands."""

from __future__ import annotations

from torchdebug_magics.html.page import Boxes, Table
from torchdebug_magics.instruments.autograd.report import Cut, GraphReport, Reach
from torchdebug_magics.instruments.autograd.view import module_boxes, page
from torchdebug_magics.report import Location


def reach(name: str, *, reached: bool = True, is_frozen: bool = False) -> Reach:
    return Reach(name=name, reached=reached, path_length=3 if reached else None, grad_norm=None, is_frozen=is_frozen)


def nodes(module: str) -> tuple[str, int]:
    return module, 1024


def cut(source: str, line: int = 7, op: str = "detach") -> Cut:
    return Cut(op=op, location=Location(cell=4, file="cell", line=line, function="forward", source=source), module="")


def test_the_order_is_that_of_the_graph_and_the_rest_stands_where_the_model_has_it() -> None:
    report = GraphReport(
        reaches=(reach("head.weight"), reach("idle.weight", reached=False), reach("base.weight")), modules=(nodes("base"), nodes("head"))
    )
    assert [box.path for box in module_boxes(report)] == ["base", "head", "idle"]


def test_a_cut_stands_before_what_is_reached() -> None:
    report = GraphReport(
        reaches=(reach("base.weight", reached=False), reach("head.weight")), modules=(nodes("head"),), cuts=(cut("h = h.detach()"),)
    )
    assert [(box.path, len(box.cuts)) for box in module_boxes(report)] == [("base", 1), ("head", 0)]


def test_a_cut_stands_behind_the_module_that_its_line_names_and_once() -> None:
    line = "text = torch.tensor(self.text(ids).tolist())"
    report = GraphReport(
        reaches=(reach("text.weight", reached=False), reach("idle.weight", reached=False), reach("head.weight")),
        modules=(nodes("head"),),
        cuts=(cut(line, op="lift_fresh"), cut(line, op="_local_scalar_dense")),
    )
    assert [[one.op for one in box.cuts] for box in module_boxes(report)] == [["lift_fresh"], [], []]


def test_many_modules_are_folded_by_the_beginning_of_their_paths() -> None:
    paths = [f"blocks.{block}.{part}" for block in range(10) for part in ("one", "two")]
    report = GraphReport(reaches=tuple(reach(f"{path}.weight") for path in paths), modules=tuple(map(nodes, paths)))
    boxes = module_boxes(report)
    assert [box.path for box in boxes] == [f"blocks.{block}" for block in range(10)]
    assert {(box.reached_count, box.saved_bytes) for box in boxes} == {(2, 2048)}


def test_the_picture_says_what_each_module_gets_and_ends_with_the_loss() -> None:
    report = GraphReport(
        reaches=(reach("base.weight", reached=False), reach("old.weight", reached=False, is_frozen=True), reach("head.weight")),
        modules=(nodes("head"),),
        nodes_count=2,
        saved_bytes=1024,
        cuts=(cut("h = h.detach()"),),
    )
    picture = next(block for block in page(report).blocks if isinstance(block, Boxes))
    assert [(box.name, box.status, box.text) for box in picture.boxes] == [
        ("base", "bad", "not reached: 1 parameter"),
        ("old", "info", "1 parameter frozen"),
        ("head", "good", "1 of 1 parameter reached, 1.0 KiB saved for backward"),
        ("loss", "info", "2 graph nodes, 1.0 KiB saved for backward"),
    ]
    assert picture.boxes[0].stops == ("cut by `detach` · In[4] line 7: `h = h.detach()`",)


def test_cuts_without_any_module_are_a_table() -> None:
    blocks = page(GraphReport(cuts=(cut("h = h.detach()"),))).blocks
    assert [type(block) for block in blocks] == [Table]
