"""Searches for the fewest edits with which the forward succeeds."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Forward
from torchdebug_magics.instruments.shapes.repair.edit import Repair, ValueChange
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, facts_of
from torchdebug_magics.instruments.shapes.repair.rebuild import changed_call
from torchdebug_magics.instruments.shapes.repair.rules import diagnosis
from torchdebug_magics.instruments.shapes.repair.source import Caller, EditSite
from torchdebug_magics.instruments.shapes.repair.trial import Trials
from torchdebug_magics.instruments.shapes.report import Fix
from torchdebug_magics.probing.dry_runs.inputs import named_tensors, sizes
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.source.call_sites import constructor_call, function_node, part_made
from torchdebug_magics.probing.source.edited_source import Source, cells, exchanging, made_as, same, with_variables
from torchdebug_magics.probing.source.syntax import called, exchanged, expression, names_in, parsed, root_of, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code, location
from torchdebug_magics.report import Edit, Location

_SHOWN = 4
_NAMES_AND_NUMBERS = re.compile(r"`[^`]*`|[\d x]+")
ALWAYS_THROUGH = frozenset(["view", "reshape", "view_as", "reshape_as", "unflatten"])
"""Alone, another view of a tensor succeeds whatever was meant."""
_OF_NN = re.compile(r"(?<![\w.])nn\.")
_MOVES = frozenset({"to", "cuda", "double", "half"})
OUR_NAME = re.compile(r"^model(?=\[| = )", re.MULTILINE)
_WIDE = (5, 3, 2, 1)
"""How many half-way states are taken further after each round; there is one round more."""
_TWICE = ValueChange(str, lambda tensor: torch.cat([tensor, tensor]))
_SHORTER = ValueChange(str, lambda tensor: tensor[:, :-1])
_DIMENSIONS = r"\.(?:permute|transpose|flatten|unsqueeze|squeeze|movedim|select|mean|sum|argmax|size)\([^()]*\)|shape\[[^]]*\]|dim=-?\d+"
"""Where a number is a dimension, and no size."""


@dataclass(frozen=True, eq=False)
class _State:
    """Edits that take the forward further than it came before, and where it breaks then."""

    edits: tuple[Repair, ...]
    facts: FailureFacts
    reached: int
    rank: int = 0
    remade: bool = False
    """Whether a module was made anew twice, for what comes in and for what is to go out."""
    complaints: frozenset[str] = frozenset()
    """What was wrong so far, without names and numbers: the same op may fail for one reason after another."""


@dataclass(frozen=True, eq=False)
class _Way:
    """Edits that let the whole forward through."""

    edits: tuple[Repair, ...]
    rank: int
    remade: bool
    mixed: str = ""
    """What is wrong with it: the batch of the input is not in what came out, or no other batch would succeed."""

    @property
    def natural(self) -> bool:
        return all(edit.natural for edit in self.edits)

    @property
    def order(self) -> tuple[bool, bool, int, int]:
        """What comes first: those that keep the batch, then natural ones, then the fewest edits, then the least rank."""
        return bool(self.mixed), not self.natural, _many(self.edits), self.rank


def fixes(candidates: Sequence[Repair], facts: FailureFacts, reached: int, trials: Trials | None) -> tuple[Fix, ...]:
    """Those that were tried and let the whole forward through: the fewest edits first, then the most natural.

    Failing that, the first candidates: not tried, or natural and not enough.
    """
    caller = trials.inputs.caller if trials is not None else None
    if trials is None or not candidates:
        return tuple(_fix((edit,), facts, verified=False) for edit in _by_rank(candidates)[:2])
    search = _Search(trials)
    states = [_State((), facts, reached, complaints=frozenset([_complaint(facts)]))]
    for wide in (*_WIDE, 0):
        states = sorted(search.round(states, candidates), key=lambda state: (state.remade, state.rank, -state.reached))[:wide]
        if not states or any(way.natural and not way.mixed for way in search.through):
            break
    if not search.through:
        left = [edit for edit in _by_rank(candidates) if edit.natural and edit.code not in search.in_vain]
        return tuple(_fix((edit,), facts, verified=False, caller=caller) for edit in left[:2])
    plain = [way for way in search.through if not way.remade]
    ways = sorted(plain or search.through, key=lambda way: way.order)[:_SHOWN]
    return tuple(_fix(way.edits, facts, verified=not way.mixed, also=way.mixed, caller=caller) for way in ways)


class _Search:
    """Breadth first: every state with every edit that its facts suggest."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self.through: list[_Way] = []
        self.in_vain: set[str] = set()

    def round(self, states: Sequence[_State], candidates: Sequence[Repair]) -> list[_State]:
        """The states that one edit more leads to."""
        following: list[_State] = []
        for state in states:
            for edit in _by_rank(diagnosis(state.facts).edits if state.edits else candidates):
                is_full = len(self.through) >= _SHOWN and state.rank + edit.rank > max(way.rank for way in self.through)
                if not self._trials.left or is_full:
                    break
                if edit.ops and state.facts.site is not None and edit.code == state.facts.site.text:
                    continue  # it reads as it was written
                following += self._tried(state, edit)
        return following

    def _tried(self, state: _State, edit: Repair) -> list[_State]:
        # A module that is made anew once more, from what it was made before: one place, not two.
        kept = tuple(earlier for earlier in state.edits if not earlier.modules or earlier.modules.keys() - edit.modules.keys())
        edits, rank, remade = (*kept, edit), state.rank + edit.rank, state.remade or len(kept) < len(state.edits)
        run = self._trials.run(edits)
        if run is not None and run.error is None:
            # A layer may have been made to fit samples that were taken for features.
            mixed = mixed_batch(run) if any(edit.modules for edit in edits) else ""
            self.through.append(_Way(edits, rank, remade, mixed or bound_to(edits, run, self._trials)))
        elif run is not None:
            facts = facts_of(run, guard=self._trials.guard)
            further = run.reached - state.reached - len(edit.calls)  # a changed argument is one call more
            complaint = _complaint(facts)
            is_earlier = any(op.site is not state.facts.site for op in edit.ops)  # what it makes, the next part may refuse at first
            if further > 0 or ((not further or is_earlier) and complaint not in state.complaints):
                return [_State(edits, facts, run.reached, rank, remade, state.complaints | {complaint})]
            self.in_vain.add(edit.code)
        return []


def _complaint(facts: FailureFacts) -> str:
    return _NAMES_AND_NUMBERS.sub("", diagnosis(facts).sentence)


def _many(edits: tuple[Repair, ...]) -> int:
    return sum(edit.many for edit in edits)


def _by_rank(edits: Sequence[Repair]) -> list[Repair]:
    seen: dict[str, Repair] = {}
    for edit in sorted(edits, key=lambda edit: (edit.many, edit.rank)):
        seen.setdefault(edit.code, edit)
    return list(seen.values())


def _in_one(edits: Sequence[Repair], caller: Caller | None) -> dict[Repair, str]:
    """What to type for each; one expression where an edited one stands in another, and the user's own call where an input is changed."""
    codes = {edit: _at_call(edit, caller) or _of_caller(edit.code, caller) for edit in edits}
    for inner, outer in itertools.combinations(edits, 2):
        call = caller.site.expression if caller is not None else None
        if isinstance(call, ast.Call) and inner in codes and all(_at_call(edit, caller) for edit in (inner, outer)):
            codes[outer] = _both_changed(call, codes.pop(inner), codes[outer])
        elif inner in codes and len(inner.ops) == 1 and outer.ops:
            site = inner.ops[0].site
            whole = _with_part(codes[outer], site.text, codes[inner]) if outer.ops[0].site.statement is site.statement else codes[outer]
            if whole != codes[outer]:
                codes[outer] = whole
                del codes[inner]
    return codes


def _both_changed(old: ast.Call, first: str, second: str) -> str:
    """A call with the arguments that either of two changes of it has changed."""
    mine, other = expression(first), expression(second)
    if not isinstance(mine, ast.Call) or not isinstance(other, ast.Call):
        return second
    pairs = zip(old.args, mine.args, other.args, strict=False)
    arguments = [changed if same(also, was) else also for was, changed, also in pairs]
    return ast.unparse(ast.Call(mine.func, arguments, mine.keywords))


def _with_part(code: str, part: str, new: str) -> str:
    """An expression in which a part, as it reads, is another one; the code itself where it is none, or has no such part."""
    try:
        whole, instead = expression(code), expression(new)
    except SyntaxError:
        return code
    return ast.unparse(exchanged(whole, lambda node: instead if isinstance(node, ast.expr) and ast.unparse(node) == part else None))


def _of_caller(code: str, caller: Caller | None) -> str:
    """The user's name for the model in the place of ours, which stands where it is a list of modules, or one alone."""
    match caller.site.expression if caller is not None else None:
        case ast.Call(ast.Name() | ast.Attribute() as model):
            return OUR_NAME.sub(ast.unparse(model), code)
    return code


def _at_call(edit: Repair, caller: Caller | None) -> str:
    """The user's call of the model with the one input changed, of which the edit is."""
    first, *rest = edit.code.splitlines()
    if caller is None or len(edit.inputs) != 1 or edit.ops or len(rest) != len(edit.modules):
        return ""
    ((name, change),) = edit.inputs.items()
    call = caller.changed(name, change.text) if first == f"{name} = {change.text(name)}" else ""
    return "\n".join([call, *(_of_caller(line, caller) for line in rest)]) if call else ""


def _fix(edits: tuple[Repair, ...], facts: FailureFacts, *, verified: bool, also: str = "", caller: Caller | None = None) -> Fix:
    whys = dict.fromkeys([*(edit.why for edit in edits if edit.why), *([also] if also else [])])
    typed = (*(edit for edit in edits if not edit.moves), *(edit for edit in reversed(edits) if edit.moves))
    codes = _in_one(typed, caller)
    before = [_before_it(edit, code, facts.site) for edit, code in codes.items() if len(codes) == 1 and facts.site is not None]
    made = [_where_made(edit, code, facts, caller) or _where_it_ran(edit, code) for edit, code in codes.items()]
    changes = tuple(edit for edit in before if edit is not None) or (tuple(itertools.chain(*made)) if all(made) else ())
    shown = "\n".join(codes.values())
    if not changes and all(edit.modules and not (edit.sites or edit.inputs or edit.attributes) for edit in edits):
        shown, changes = _in_the_model(shown, caller)
    return Fix(code=shown, verified=verified, why="; ".join(whys), edits=_many(edits), changes=changes)


def _in_the_model(code: str, caller: Caller | None) -> tuple[str, tuple[Edit, ...]]:
    """New parts, put into the model after the statement that makes it: their own place is made in a loop, or for others as well."""
    call = caller.site.expression if caller is not None else None
    if caller is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return code, ()
    name = call.func.id
    for where, whole in made_as(caller.site.code.co_filename, name):
        tree = tree_of(where.file)
        source = None if tree is None else Source(where, tree)
        made = None if source is None else source.statement
        if source is None or not isinstance(made, ast.Assign) or made.value is not whole or len(made.targets) != 1:
            return code, ()
        later = [node for cell in cells() for node in ast.walk(cell.tree)]
        is_loaded = any(called(node) == "load_state_dict" and root_of(node.func) == name for node in later if isinstance(node, ast.Call))
        if is_loaded or any(isinstance(node, ast.Attribute) and node.attr.startswith("requires_grad") for node in later):
            return code, ()  # what is put in before would be lost, or frozen
        lines = [_OF_NN.sub(r"torch.nn.", line) if "nn" not in caller.site.names else line for line in code.splitlines()]
        parts = [line if line.startswith((f"{name}.", f"{name}[")) else f"{name}{'' if line[0] == '[' else '.'}{line}" for line in lines]
        if called(whole) in _MOVES:  # as the model is
            parts = [f"{line}.{called(whole)}({', '.join(map(ast.unparse, (*whole.args, *whole.keywords)))})" for line in parts]
        return "\n".join(parts), (source.after(made, "\n".join(parts)),)
    return code, ()


def _where_made(repair: Repair, code: str, facts: FailureFacts, caller: Caller | None) -> tuple[Edit, ...]:
    """The calls that make modules, and inputs that are changed before anything else in the forward; none where one of them is unknown.

    A module is made in the constructor of the class that holds it, or where the model is made, as an `nn.Sequential` is.
    """
    lines, paths, modules = code.splitlines(), list(repair.modules), facts.modules
    is_changed_input = repair.inputs and (_at_call(repair, caller) or (paths and lines[0].partition(" = ")[0] in repair.inputs))
    edits = [_of_input(line, modules, caller) for line in lines[: len(lines) - len(paths)]] if is_changed_input else []
    for line, path in zip(lines[len(edits) :], paths if "" in modules else (), strict=False):
        tree, made = parsed(line), _call_of(path, facts, caller)
        part = modules[path] if path in modules else modules[""].get_submodule(path)  # which the forward has not reached
        match tree.body if tree is not None else []:
            case [ast.Assign(value=ast.Call() as new)] if made is not None and called(made[1]) == type(part).__name__:
                is_alike = called(made[1]) == called(new)
                edits.append(exchanging(*made, with_variables(made[1], changed_call(made[1], new, part)) if is_alike else new))
    is_whole = all(edits) and len(edits) == len(lines) and not (repair.ops or repair.calls)
    return tuple(itertools.chain(*edits)) if is_whole else ()


def _call_of(path: str, facts: FailureFacts, caller: Caller | None) -> tuple[Location, ast.Call] | None:
    """(the statement, the call in it) that makes a module."""
    if (known := constructor_call(path, facts.modules.get)) is not None:
        return known if _is_alike_in_others(path, facts) else None
    call = caller.site.expression if caller is not None else None
    if caller is not None and isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
        file, name, names = caller.site.code.co_filename, call.func.id, path.split(".")
    elif caller is None and facts.site is not None:  # lines that call several modules by their names
        first, *names = path.split(".")
        file, name = facts.site.code.co_filename, variable_of(facts.modules.get(first)) or first
    else:
        return None
    where, whole = next(iter(made_as(file, name)), (None, None))
    part = None if whole is None else part_made(whole, names)
    return (where, part) if where is not None and isinstance(part, ast.Call) else None


def _is_alike_in_others(path: str, facts: FailureFacts) -> bool:
    """Whether each other instance of the class whose constructor makes a part has the same part: an edit there changes them all."""
    names = path.split(".")
    holders = [(".".join(names[:at]), ".".join(names[at:])) for at in reversed(range(len(names)))]
    kinds: list[Any] = [type(facts.modules.get(holder)) for holder, _ in holders]
    codes = [getattr(kind.__init__, "__code__", None) for kind in kinds]
    holder, inner = next((pair for pair, code in zip(holders, codes, strict=True) if code is not None and is_user_code(code)), ("", path))
    whole = facts.modules.get(holder)
    others = [module for module in live_modules() if type(module) is type(whole) and module is not whole] if whole is not None else []
    own = repr(whole.get_submodule(inner)) if whole is not None else ""
    parts = (dict(module.named_modules(remove_duplicate=False)).get(inner) for module in others)
    return all(repr(part) == own for part in parts if part is not None)


def _where_it_ran(repair: Repair, code: str) -> tuple[Edit, ...]:
    """The expression in the place of the one that ran, which may stand in an earlier line than the one that raised."""
    sites, tree = repair.sites, parsed(code)
    match tree.body if tree is not None and len({id(site) for site in sites}) == 1 and not repair.modules else []:
        case [ast.Expr(new)] if isinstance(sites[0].expression, ast.expr):
            return exchanging(location(sites[0].code.co_filename, sites[0].line, sites[0].code.co_name), sites[0].expression, new)
    return ()


def _of_input(code: str, modules: Mapping[str, torch.nn.Module], caller: Caller | None) -> tuple[Edit, ...]:
    """The user's call with an input changed; or the statement that changes it, above all others in the forward of the model."""
    site, tree = None if caller is None else caller.site, parsed(code)
    match tree.body if tree is not None and site is not None else []:
        case [ast.Expr(new)] if site is not None and isinstance(site.expression, ast.expr):
            return exchanging(location(site.code.co_filename, site.line, site.code.co_name), site.expression, new)
    forward: Any = getattr(type(modules.get("")), "forward", None)
    function = function_node(forward.__code__) if hasattr(forward, "__code__") and is_user_code(forward.__code__) else None
    tree = None if function is None else tree_of(forward.__code__.co_filename)
    if not isinstance(function, ast.FunctionDef) or tree is None:
        return ()
    first = function.body[ast.get_docstring(function) is not None :][0]
    return (Source(location(forward.__code__.co_filename, first.lineno, "forward"), tree).before(first, code),)


def _before_it(repair: Repair, code: str, failing: EditSite) -> Edit | None:
    """A value that is changed before the statement that raised, under the name that it has there: ``x = x.flatten(1)``."""
    tree, whole = parsed(code), tree_of(failing.code.co_filename)
    match tree.body if tree is not None else []:
        case [ast.Assign([ast.Name(name)], value)] if name in failing.names and not repair.modules and whole is not None:
            is_here = all((site.code, site.line) == (failing.code, failing.line) for site in repair.sites)
            source = Source(location(failing.code.co_filename, failing.line, failing.code.co_name), whole)
            is_alone = bool(repair.inputs) != bool(repair.ops) or not repair.inputs
            if source.statement is not None and (repair.inputs or name in names_in(value)) and is_here and is_alone:
                return source.before(source.statement, code)
    return None


def mixed_batch(run: Forward) -> str:
    """In words, where an output has no dimension of the batch's size; empty where it has one, or there is no batch to tell.

    Leading dimensions may have been joined, as those of a batch of sequences: 2 x 5 x 8 becomes 10 x 8.
    """
    inputs = [sizes(tensor) for _, tensor in named_tensors(run.given.named_values()) if tensor.dim() > 1]
    batches = {lengths[0] for lengths in inputs}
    if len(batches) != 1 or batches <= {0, 1}:
        return ""
    if any(getattr(call.module, "batch_first", True) is False for call in run.calls.made):  # steps first, and the batch may be second
        batches |= {lengths[1] for lengths in inputs} - {1}
    joined = {size for lengths in inputs for size in itertools.accumulate(lengths, operator.mul)}
    for _, tensor in named_tensors(run.output):
        returned = sizes(tensor)
        if returned and not batches.intersection(returned) and returned[0] not in joined:
            return f"runs, but returns {shape(returned)} for an input of {shape(inputs[0])}: the batch dimension is lost"
    return ""


def bound_to(edits: Sequence[Repair], run: Forward, trials: Trials) -> str:
    """In words, to which size of the inputs the edits are bound, as they write it down and another one does not succeed.

    A batch twice as large is tried, or one step fewer. Where no edit names the size, it is the user's own code that wants it.
    """
    tensors = [(name, tensor) for name, tensor in named_tensors(run.given.named_values()) if tensor.dim()]
    batch, *rest = next((sizes(tensor) for _, tensor in tensors if tensor.dim() > 1), (0,))
    if any(_names(edit, batch) for edit in edits):
        larger = [Repair("", inputs={name: _TWICE}) for name, tensor in tensors if sizes(tensor)[0] == batch]
        if _is_refused([*edits, *larger], trials):
            return f"only for a batch of {batch}"
    steps = rest[0] if len(rest) in {1, 2} else 0
    if steps > 1 and any(_names(edit, steps) for edit in edits):
        shorter = [Repair("", inputs={name: _SHORTER}) for name, tensor in tensors if sizes(tensor)[:2] == (batch, steps)]
        return f"only for {steps} steps" if _is_refused([*edits, *shorter], trials) else ""
    return ""


def _is_refused(edits: Sequence[Repair], trials: Trials) -> bool:
    run = trials.run(edits) if trials.left else None
    return run is not None and run.error is not None


def _names(edit: Repair, size: int) -> bool:
    """Whether it writes this number where the user had not, into what runs with every batch; a single one may be any number."""
    numbers = re.compile(rf"{_DIMENSIONS}|\b({size})\b")
    plain = bool(edit.sites) and not edit.modules and "\n" not in edit.code  # no module that is made new, whose numbers are others
    return plain and size > 1 and _mentions(numbers, edit.code) > sum(_mentions(numbers, site.text) for site in edit.sites)


def _mentions(numbers: re.Pattern[str], code: str) -> int:
    return sum(bool(number) for number in numbers.findall(code))
