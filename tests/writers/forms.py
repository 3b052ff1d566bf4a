"""A row of the table as the cells of a notebook, or of a script, with a magic that runs something again."""

from __future__ import annotations

import ast
from textwrap import indent
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.writers.writer import Writer

SEED = 42
"""Both `%%deterministic` and `verify` begin with it, so that their first run draws what a plain run does."""
STEPS = 6
GROWING_STEPS = 12
REPORT, SESSION = "writers_report", "writers_session"

_TRAINING = """
model_ = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer_ = torch.optim.SGD(model_.parameters(), lr=1e-7)
inputs_, targets_ = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(-3, 3, 8).reshape(8, 1)
loader_ = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs_, targets_), batch_size=8)
kept_ = []
"""
_SEEDED = f"import random as random_, numpy as numpy_\ntorch.manual_seed({SEED})\nnumpy_.random.seed({SEED})\nrandom_.seed({SEED})\n"
_STEP = """optimizer_.zero_grad()
loss_ = (model_(inputs_) - targets_).pow(2).mean()
loss_.backward()
optimizer_.step()
"""
_BAD_STEP = """optimizer_.zero_grad()
hidden_ = model_(inputs_ + effect_())
loss_ = torch.log(-1 - hidden_.abs()).mean()
loss_.backward()
optimizer_.step()
"""


class Form(NamedTuple):
    """Cells in their order; the one that is judged is the last but one, before that which closes what is open."""

    cells: tuple[str, ...]
    notebook: bool = True


def form(writer: Writer, door: str) -> Form:
    """The cells of a row under a door: see `DOORS` and `BASELINES`."""
    make = {**DOORS, **BASELINES}[door]
    judged = make(writer)
    return Form((_TRAINING + writer.setup, _SEEDED, judged, writer.finish), notebook=door not in FUNCTIONS)


def names(writer: Writer) -> tuple[str, ...]:
    """The variables that the cells of a row assign."""
    return tuple(sorted({*_assigned(writer.setup), *_assigned(writer.cell), *_assigned(writer.finish), "n"}))


def _plain(writer: Writer) -> str:
    return writer.cell


def _before(writer: Writer) -> str:
    return ""


def _growing(writer: Writer) -> str:
    return f"{_effect(writer)}\nfor i_ in range({GROWING_STEPS}):\n" + indent(
        "loss_ = model_(inputs_ + effect_()).pow(2).mean()\nkept_.append(loss_)\n", "    "
    )


def _effect(writer: Writer) -> str:
    """The cell as a function that a forward pass calls, as a loss that logs does: what runs the step again cannot leave it out."""
    return _function(writer, "effect_", "return 0.0")


def _function(writer: Writer, name: str, rest: str) -> str:
    """The cell as the body of a function whose variables are those of the notebook."""
    assigned = ", ".join(sorted(_assigned(writer.cell)))
    return f"def {name}():\n" + indent((f"global {assigned}\n" if assigned else "") + f"{writer.cell}\n{rest}", "    ")


def _verify(writer: Writer) -> str:
    return f"import torchdebug_magics\n{_function(writer, 'f_', '')}\n{REPORT} = torchdebug_magics.verify(f_)"


def _deterministic(writer: Writer) -> str:
    return f"%%deterministic --verify -o {REPORT}\n{writer.cell}"


def _overfit_step(writer: Writer) -> str:
    return f"{_function(writer, 'step_', _STEP + 'return loss_')}\n%overfit step_ --steps {STEPS} -o {REPORT}"


def _overfit_cell(writer: Writer) -> str:
    return f"%%overfit --steps {STEPS} -o {REPORT}\nfor inputs_, targets_ in loader_:\n" + indent(f"{writer.cell}\n{_STEP}", "    ")


def _nanhunt(writer: Writer) -> str:
    return f"%%nanhunt -o {REPORT}\n{_bad_step(writer)}\nstep_()"


def _bad_step(writer: Writer) -> str:
    return f"{_effect(writer)}\ndef step_():\n" + indent(_BAD_STEP, "    ")


def _nanhunt_function(writer: Writer) -> str:
    return f"import torchdebug_magics\n{_bad_step(writer)}\n{SESSION} = torchdebug_magics.nanhunt()\nwith {SESSION}:\n    step_()"


def _overfit_function(writer: Writer) -> str:
    step = _function(writer, "step_", _STEP + "return loss_")
    return f"import torchdebug_magics\n{step}\n{REPORT} = torchdebug_magics.overfit(step_, steps={STEPS})"


BASELINES = {"plain": _plain, "before": _before, "growing": _growing}
"""Without a magic: the cell once, not at all, and in a loop whose list grows."""
DOORS = {
    "verify": _verify,
    "deterministic": _deterministic,
    "overfit_step": _overfit_step,
    "overfit_cell": _overfit_cell,
    "nanhunt": _nanhunt,
    "overfit_function": _overfit_function,
    "nanhunt_function": _nanhunt_function,
}
FUNCTIONS = ("verify", "overfit_function", "nanhunt_function")
"""Doors of a script; the others are magics of a notebook."""


def baselines(door: str) -> tuple[str, ...]:
    """The plain runs that an outcome is compared with; it must be as after the first, or where a magic puts all back, the second."""
    return ("plain", "before") if door.startswith("overfit") else ("plain",)


def _assigned(source: str) -> set[str]:
    """The names that module code binds or deletes, apart from those of functions, comprehensions and classes inside."""
    bound: set[str] = set()
    for node in _outer(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                bound.update((alias.asname or alias.name).partition(".")[0] for alias in aliases)
    return bound


def _outer(node: ast.AST) -> list[ast.AST]:
    inner = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    below = [] if isinstance(node, inner) else [each for child in ast.iter_child_nodes(node) for each in _outer(child)]
    return [node, *below]
