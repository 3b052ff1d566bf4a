"""A fix in words becomes an edit of the statement that it speaks of, or none; the edited source differs in that statement alone."""

from __future__ import annotations

import ast
import dataclasses
import linecache
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import torchdebug_magics
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.fixes import applied, changes
from torchdebug_magics.probing.source.edits import with_edits
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Edit, Finding, Location, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

SOURCE = """\
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, total = [], 0.0

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(
            400,
            10,
        )

    def forward(self, x):
        return self.fc1(x).log()  # of scores

for x in torch.randn(5, 8, 4):
    loss = model(x).square().mean(); seen = True
    loss.backward()
    losses.append(loss)
    total += loss
    optimizer.step()
for _ in range(2):
    total += 1
    if total > 3:
        print(loss)
with torch.no_grad():
    x = model(x)
    print(total)
"""


@dataclass(frozen=True, kw_only=True)
class Found(Report):
    finding: Finding

    @property
    def verdict(self) -> str:
        return self.finding.fix


@pytest.fixture
def file() -> Iterator[str]:
    name = "<ipython-input-of-a-test>"
    linecache.cache[name] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), name)
    yield name
    del linecache.cache[name]


def report_of(file: str, code: str, fix: str, *, state: str = "advice") -> Found:
    line = next(number for number, text in enumerate(SOURCE.splitlines(), 1) if text.strip().startswith(code))
    where = Location(cell=None, file=file, line=line, function="<module>", source=SOURCE.splitlines()[line - 1].strip())
    return Found(finding=Finding(location=where, fix=fix, fix_state=state))  # type: ignore[arg-type]


CASES = {
    "a call without arguments, on another receiver": (
        "optimizer = torch",
        "write `model.float().parameters()`",
        [("model.parameters()", "model.float().parameters()")],
    ),
    "the statement at the line": (
        "losses.append",
        "write `losses.append(loss.detach())`: `losses` keeps each graph",
        [("    losses.append(loss)", "    losses.append(loss.detach())")],
    ),
    "at the end of the loop's body": (
        "losses.append",
        "run `total = total.detach()` at the end of each step",
        [("    optimizer.step()", "    optimizer.step()\n    total = total.detach()")],
    ),
    "at the end of a body whose last statement has one": (
        "total += 1",
        "run `total = total.detach()` at the end of each step",
        [("        print(loss)\n", "        print(loss)\n    total = total.detach()\n")],
    ),
    "after one of several statements in a line": (
        "losses.append",
        "write `seen = None` after `seen = True`",
        [("seen = True", "seen = True\n    seen = None")],
    ),
    "an assignment for an augmented one": (
        "total +=",
        "write `total = total + loss.item()`",
        [("    total += loss", "    total = total + loss.item()")],
    ),
    "an expression in its place": (
        "losses.append",
        "write `loss.item()` in place of `loss`",
        [("    losses.append(loss)", "    losses.append(loss.item())")],
    ),
    "what follows on the line stays": (
        "loss = model",
        "write `loss = model(x).abs().mean()`",
        [("    loss = model(x).square().mean(); seen = True", "    loss = model(x).abs().mean(); seen = True")],
    ),
    "a comment stays": (
        "return",
        "write `return self.fc1(x).clamp(min=1e-6).log()`",
        [("self.fc1(x).log()", "self.fc1(x).clamp(min=1e-6).log()")],
    ),
    "a statement of several lines, far from the line": (
        "return",
        "write `fc1 = torch.nn.Linear(4, 10)`",
        [
            (
                "        self.fc1 = torch.nn.Linear(\n            400,\n            10,\n        )",
                "        self.fc1 = torch.nn.Linear(4, 10)",
            )
        ],
    ),
    "a statement before another": (
        "optimizer.step",
        "call `optimizer.zero_grad()` before `loss.backward()`",
        [("    loss.backward()", "    optimizer.zero_grad()\n    loss.backward()")],
    ),
    "a statement after another": (
        "loss.backward",
        "put `optimizer.zero_grad()` after `optimizer.step()`",
        [("    optimizer.step()", "    optimizer.step()\n    optimizer.zero_grad()")],
    ),
    "two lines that are numbered": (
        "losses.append",
        "write `losses.append(loss.item())` in line 20 and `total += loss.item()` in line 21",
        [("    losses.append(loss)", "    losses.append(loss.item())"), ("    total += loss", "    total += loss.item()")],
    ),
    "a statement that moves": (
        "loss.backward",
        "move `loss.backward()` below `losses.append(loss)`",
        [("    loss.backward()\n    losses.append(loss)", "    losses.append(loss)\n    loss.backward()")],
    ),
    "two statements that move": (
        "loss.backward",
        "move `loss.backward()`, `losses.append(loss)` below `optimizer.step()`, or compute it again",
        [
            (
                "    loss.backward()\n    losses.append(loss)\n    total += loss\n    optimizer.step()",
                "    total += loss\n    optimizer.step()\n    loss.backward()\n    losses.append(loss)",
            )
        ],
    ),
    "a statement that moves out of its block": (
        "x = model",
        "move `x = model(x)` out of `torch.no_grad()`",
        [("with torch.no_grad():\n    x = model(x)\n", "x = model(x)\nwith torch.no_grad():\n")],
    ),
    "the last statement of a block moves out of it": (
        "print(total)",
        "move `print(total)` out of `torch.no_grad()`",
        [("    print(total)", "print(total)")],
    ),
    "a block around the statement, with the statement in it": (
        "total +=",
        "write `with torch.no_grad(): total += loss`, or write into a clone",
        [("    total += loss", "    with torch.no_grad():\n        total += loss")],
    ),
    "an option that is there already": (
        "losses.append",
        "write `torch.optim.SGD(..., lr=0.1, momentum=0.9)`",
        [("lr=0.1)", "lr=0.1, momentum=0.9)")],
    ),
    "what is made of a value comes after it": (
        "loss.backward",
        "write `model = model.double()`",
        [("model = torch.nn.Linear(4, 2)", "model = torch.nn.Linear(4, 2)\nmodel = model.double()")],
    ),
    "a further option": (
        "losses.append",
        "write `torch.optim.SGD(..., momentum=0.9)`",
        [("lr=0.1)", "lr=0.1, momentum=0.9)")],
    ),
    "a function around a value": (
        "losses.append",
        "use `float(loss)`",
        [("    losses.append(loss)", "    losses.append(float(loss))")],
    ),
    "an expression in a later line of a statement": (
        "self.fc1",
        "write `len(CLASSES)` in place of `10`",
        [("            10,\n", "            len(CLASSES),\n")],
    ),
    "a part of an object after it was made": (
        "losses.append",
        "write `model.bias.data = torch.ones(2)`",
        [("model = torch.nn.Linear(4, 2)", "model = torch.nn.Linear(4, 2)\nmodel.bias.data = torch.ones(2)")],
    ),
    "a block around the loop": (
        "losses.append",
        "run the loop under `with torch.no_grad():`",
        [("for x in torch.randn(5, 8, 4):", "with torch.no_grad():\n    for x in torch.randn(5, 8, 4):")],
    ),
}
ADVICE = {
    "words alone": "lower the learning rate",
    "code that does not parse": "write `losses.append(loss.`",
    "a name alone": "look at `losses`",
    "a function of a module": "use `torch.manual_seed(42)`",
    "another call of self": "use `self.fc2(x.float())`",
    "a number that names a module": "replace the layer at `4` with `torch.nn.ReLU()`",
    "an option": "pass `reduction='sum'`",
    "a part before it is words": "write Conv2d() and `losses.append(loss.item())`",
    "a part after it is words": "write `losses.append(loss.item())` and Linear() with bias=False",
    "another call with an effect": "call `(loss + total).append(loss)`",
    "the same call elsewhere": "call `loss.backward(retain_graph=True)`",
    "what stands nowhere": "write `metrics = compute(metrics)`",
    "what is written already": "write `losses.append(loss)`",
    "a place that does not exist": "call `optimizer.zero_grad()` before `scheduler.step()`",
}


@pytest.mark.parametrize("case", CASES)
def test_the_edited_source_is_as_the_fix_says(case: str, file: str) -> None:
    code, fix, pairs = CASES[case]
    report = with_edits(report_of(file, code, fix))
    want = SOURCE
    for old, new in pairs:
        assert old in want
        want = want.replace(old, new)
    if case == "a block around the loop":
        head, _, loop = want.partition("with torch.no_grad():\n    for")
        body, _, rest = loop.partition("\nfor _")
        want = f"{head}with torch.no_grad():\n    for{body.replace(chr(10), chr(10) + '    ')}\nfor _{rest}"
    assert torchdebug_magics.fixed_source(report) == {file: want}
    assert (report.fix, report.fix_state) == (fix, "compiles")
    assert report.to_dict()["edits"] == [dataclasses.asdict(edit) for edit in report.edits]


@pytest.mark.parametrize("case", ADVICE)
def test_advice_has_no_edits(case: str, file: str) -> None:
    code = "for x in torch" if "module" in case else "return self" if "self" in case else "losses.append"
    report = report_of(file, code, ADVICE[case])
    assert with_edits(report) is report
    assert (report.edits, report.fix_state) == ((), "advice")
    with pytest.raises(TorchDebugError, match="advice"):
        torchdebug_magics.fixed_source(report)


def test_a_fix_that_was_run_stays_verified(file: str) -> None:
    report = with_edits(report_of(file, "losses.append", "write `losses.append(loss.item())`", state="verified"))
    assert report.fix_state == "verified"
    assert changes(report).splitlines()[-3:] == ["-    losses.append(loss)", "+    losses.append(loss.item())", "     total += loss"]


def test_a_source_that_has_changed_since_is_not_edited(file: str) -> None:
    report = with_edits(report_of(file, "losses.append", "write `losses.append(loss.item())`"))
    linecache.cache[file] = (3, None, ["x = 1\n", "y = 2\n"], file)
    with pytest.raises(TorchDebugError, match="no longer as it was"):
        torchdebug_magics.fixed_source(report)


def test_whatever_a_fix_says_the_edited_file_is_a_program_or_there_are_no_edits(file: str) -> None:
    """Random pieces of code and words: nothing raises, and only the statements named in the edits differ."""
    pieces = [f"`{line.strip()}`" for line in SOURCE.splitlines() if line.strip()]
    pieces += ["`x`", "`loss.item()`", "`)`", "`lr=1e-3`", "`with torch.no_grad():`", "`total = 0`", "`y = loss`", "`del losses`"]
    words = [
        "write",
        "in place of",
        "before",
        "after",
        "above the loop",
        "in line 20",
        "under",
        "or",
        "by",
        "instead of",
        "after that line:",
        ";",
    ]
    lines = [line.strip() for line in SOURCE.splitlines() if line.strip()]
    seed = random.Random(7)
    edited = 0
    for _ in range(600):
        fix = " ".join(seed.choice(pieces if at % 2 else words) for at in range(seed.randint(2, 7)))
        report = with_edits(report_of(file, seed.choice(lines), fix))
        if report.edits:
            edited += 1
            new = torchdebug_magics.fixed_source(report)[file]
            ast.parse(new)
            assert new != SOURCE, fix
            untouched = {edit.line for edit in report.edits} | {
                edit.line + n for edit in report.edits for n in range(edit.old.count("\n") + 1)
            }
            kept = [line for number, line in enumerate(SOURCE.splitlines(), 1) if number not in untouched and line.strip()]
            assert [line for line in kept if line not in new] == [], fix
    assert edited >= 40


def test_what_an_edit_keeps_stays_as_it_stands() -> None:
    kept = 'if step:\n        print("""a\n b""")'
    text = f"for step in x:\n    {kept}\n"
    edit = Edit(cell=1, file="", line=2, old='if step:\n    print("""a\n b""")', new='if step:\n    print("""a\n b""")\nstep = 0')
    assert applied(text, [edit]) == f"for step in x:\n    {kept}\n    step = 0\n"


def test_edits_are_applied_from_below() -> None:
    def edit(line: int, old: str, new: str) -> Edit:
        return Edit(cell=1, file="", line=line, old=old, new=new)

    text = "if x:\n    a = 1\n    b = [\n        2,\n    ]\nc = 3\n"
    edits = [edit(2, "a = 1", ""), edit(3, "b = [\n    2,\n]", "b = [\n    4,\n]"), edit(6, "", "d = 5")]
    assert applied(text, edits) == "if x:\n    b = [\n        4,\n    ]\nd = 5\nc = 3\n"
    with pytest.raises(ValueError, match="line 2"):
        applied(text, [edit(2, "a = 2", "a = 3")])


CELLS = (
    "import torch",
    "class Net(torch.nn.Module):\n    def forward(self, x):\n        return self.mod(x)",
    "state, images = [3, 1, 2], torch.zeros(2, 4, 1, 1)\nnet = Net()",
    "# the call\nscores = net(images)\nsmall = min(state)",
)


@pytest.mark.parametrize(
    ("fix", "state", "fixed"),
    [
        ("write `net(images.flatten(1))`", "verified", "# the call\nscores = net(images.flatten(1))\nsmall = min(state)"),
        ("write `net(images.flatten(1))`", "advice", ""),  # nobody has tried it: the words may mean another call
        (
            "add `torch.manual_seed(42)` at the top of this cell",
            "advice",
            "# the call\ntorch.manual_seed(42)\nscores = net(images)\nsmall = min(state)",
        ),
        (
            "work on a copy, `images.clone()`, or create `images` in this cell",
            "advice",
            "# the call\nscores = net(images.clone())\nsmall = min(state)",
        ),
        (
            "work on a copy, `copy.deepcopy(state)`, or create `state` in this cell",
            "advice",
            "# the call\nimport copy\nscores = net(images)\nsmall = min(copy.deepcopy(state))",
        ),
        (
            "work on a copy, `copy.deepcopy(net)`, or create `net` in this cell",
            "advice",
            "# the call\nimport copy\nscores = copy.deepcopy(net)(images)\nsmall = min(state)",
        ),
        ("work on a copy, `copy.deepcopy(absent)`", "advice", ""),
    ],
)
def test_what_changes_the_running_cell(shell: InteractiveShell, fix: str, state: Any, fixed: str) -> None:
    for cell in CELLS:
        shell.run_cell(cell, store_history=True)
    files = [name for name in linecache.cache if name in shell.compile._filename_map]
    where = location(files[1], 3, "forward")
    assert where.cell == 2
    report = with_edits(Found(finding=Finding(location=where, fix=fix, fix_state=state)))
    if fixed:
        assert torchdebug_magics.fixed_source(report) == {4: fixed}
        assert {edit.cell for edit in report.edits} == {4}
    else:
        assert report.edits == ()


def test_a_line_of_magics_is_not_the_cell_that_is_changed(shell: InteractiveShell) -> None:
    for cell in (*CELLS, "%load_ext torchdebug_magics"):
        shell.run_cell(cell, store_history=True)
    where = location(next(name for name in linecache.cache if shell.compile._filename_map.get(name) == 2), 3, "forward")
    report = with_edits(Found(finding=Finding(location=where, fix="write `net(images.flatten(1))`", fix_state="verified")))
    assert torchdebug_magics.fixed_source(report) == {4: "# the call\nscores = net(images.flatten(1))\nsmall = min(state)"}
