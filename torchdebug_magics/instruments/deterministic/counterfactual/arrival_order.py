"""The same start, with what another process may be given: folders listed and work finished in another order, another process number."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from torchdebug_magics.instruments.deterministic.counterfactual.effect import effect_of
from torchdebug_magics.instruments.deterministic.counterfactual.reachable_state import reached
from torchdebug_magics.instruments.deterministic.influences.answers import Answers
from torchdebug_magics.instruments.deterministic.influences.influence import ARRIVAL, LISTING, PROCESS
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.probing.source.code_owner import writes_of

_ASKING = frozenset(
    {"listdir", "scandir", "iglob", "glob", "rglob", "iterdir", "walk", "as_completed", "imap_unordered", "getpid", "getppid"}
)


def on_arrival(runs: Runs, earlier: Recording, results: Mapping[str, int]) -> Dependence | None:
    """What moves the results then; no run where nothing that is reached by name asks for such an order."""
    if not _asks(runs):
        return None
    answers = Answers(runs.body.namespace, turned=None)
    with runs.otherwise(answers.attach):
        effect = effect_of(runs, earlier, results)
    if effect is None or not effect.reached:
        return None
    begin = min(effect.reached, key=lambda one: one.place)
    asked = [one for one in answers.given if one.influence in {ARRIVAL, LISTING, PROCESS}]
    for one in asked if len(asked) > 1 else ():
        with runs.otherwise(Answers(runs.body.namespace, turned=frozenset({one})).attach):
            alone = effect_of(runs, earlier, results)
        if alone is not None and alone.reached:
            asked = [one]
            break
    if not asked:
        return None
    told = asked[0].dependence
    return Dependence(
        on=told.on,
        op="" if begin.op is None else begin.op.plan.name,
        module=begin.module,
        location=told.location,
        what=told.what,
        fix=told.fix,
    )


def _asks(runs: Runs) -> bool:
    _, codes = reached(runs.body)
    in_body = {word for one in runs.body.statements for word in re.findall(r"\w+", ast.unparse(one))}
    return bool(_ASKING & in_body) or any(_ASKING & (written.loaded | written.loaded_attributes) for written in map(writes_of, codes))
