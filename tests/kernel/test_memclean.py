"""Whatever keeps a tensor for the notebook is found, is freed when asked, and costs what was said."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks, on_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel, Ran

# What is left after it was cleaned is passed by: each question would else read half a million objects of imports, several times.
# A name of an output that other tests gave to something else, as `for _ in` does, would keep IPython from using it.
BEGIN = """
import torch, weakref
refs = []
def big(mib=16):
    tensor = torch.ones(mib << 18)
    refs.append(weakref.ref(tensor.untyped_storage()))
    return tensor
for name in ("_", "__", "___"):
    globals().pop(name, None)
del name
%memclean --free -q
__import__("gc").freeze()
"""
_RAISES = "def f():\n    mine = big()\n    raise ValueError\n"
FAILURES = {
    "plain": f"{_RAISES}f()",
    "in the cell's own call": "def f(mine):\n    return mine @ 'text'\nf(big())",
    "chained": f"{_RAISES}try:\n    f()\nexcept ValueError as error:\n    raise RuntimeError from error",
    "while handling": f"{_RAISES}try:\n    f()\nexcept ValueError:\n    1 / 0",
    "interrupt": "def f():\n    mine = big()\n    raise KeyboardInterrupt\nf()",
    "await": "import asyncio\nasync def f():\n    mine = big()\n    await asyncio.sleep(0)\n    raise ValueError\nawait f()",
    "group": f"{_RAISES}try:\n    f()\nexcept ValueError as error:\n    raise ExceptionGroup('two', [error])",
}


@pytest.fixture
def clean(kernel: Kernel) -> Kernel:
    """A kernel in which nothing of an earlier test is held."""
    ran = kernel.run(BEGIN)
    assert ran.status == "ok", ran.traceback
    return kernel


def asked(kernel: Kernel, line: str) -> Ran:
    ran = kernel.run(f"{line} -o m")
    assert ran.status == "ok", ran.traceback
    return ran


def alive(kernel: Kernel) -> int:
    return int(kernel.value("sum(ref() is not None for ref in refs)") or -1)


@pytest.mark.parametrize(("stack", "case"), on_stacks(FAILURES, colab=("await",)), indirect=["stack"])
def test_an_old_error_is_found_and_freed(case: str, clean: Kernel) -> None:
    failed = clean.run(FAILURES[case])
    assert failed.status == "error"
    shown = asked(clean, "%memclean")
    assert alive(clean) == 1, "to look frees nothing"
    assert re.search(r"The error of In\[\d+\] holds 16\.0 MiB", shown.text)
    assert "fix `%memclean --free exception`" in " ".join(shown.text.split())
    assert "`%debug` will no longer work on that error" in " ".join(shown.text.split())
    asked(clean, "%memclean --free exception")
    assert alive(clean) == 0
    assert clean.value("[(one.name, one.freed_bytes) for one in m.freed if one.freed_bytes]") == "[('exception', 16777216)]"


def test_after_that_the_debugger_has_nothing_to_work_on_and_says_so(clean: Kernel) -> None:
    clean.run(FAILURES["plain"])
    asked(clean, "%memclean --free exception")
    assert "No traceback" in clean.run("%debug").text
    assert "No traceback" in clean.run("%tb").text
    assert clean.run("1 / 0").ename == "ZeroDivisionError"
    assert "ZeroDivisionError" in clean.run("%tb").text


@on_both_stacks
def test_outputs_are_found_by_number_and_freed(clean: Kernel) -> None:
    first, second = clean.run("big(16)").count, clean.run("[big(8)]").count
    clean.run("pass")
    shown = " ".join(asked(clean, "%memclean").text.split())
    assert f"`Out[{first}]` and `Out[{second}]` hold 24.0 MiB fix `%memclean --free out`" in shown
    assert clean.value("[(one.name, one.alone_bytes) for one in m.holdings]") == f"[('Out[{first}]', 16777216), ('Out[{second}]', 8388608)]"
    asked(clean, "%memclean --free out")
    assert alive(clean) == 0
    assert clean.value("(len(Out), m.freed_bytes)") == "(0, 25165824)"
    for name in (f"_{first}", f"_{second}"):
        assert clean.run(name).ename == "NameError"
    number = clean.run("41 + 1").count
    assert clean.value(f"(_, Out[{number}], _{number})") == "(42, 42, 42)"


def test_one_output_alone_is_freed_and_the_others_stay(clean: Kernel) -> None:
    first, second = clean.run("big(16)").count, clean.run("[big(8)]").count
    asked(clean, f"%memclean --free Out[{first}]")
    assert alive(clean) == 1
    assert clean.value(f"(list(Out), type(_{second}).__name__, '_{first}' in globals())") == f"([{second}], 'list', False)"


@pytest.mark.parametrize("removal", ["del Out[{n}]", "del _{n}", "Out.clear()", "%reset -f out"])
def test_an_output_that_the_user_removed_by_half_is_found_where_it_still_is(removal: str, clean: Kernel) -> None:
    shown = clean.run("big()")
    clean.run(removal.format(n=shown.count))
    clean.run("pass")
    if not alive(clean):
        pytest.fail("IPython has learnt to free it: this test can go")
    assert re.search(r"` holds? [\d.]+ MiB", asked(clean, "%memclean").text)
    asked(clean, "%memclean --free out")
    assert alive(clean) == 0


def test_a_name_of_the_users_own_stays(clean: Kernel) -> None:
    clean.run("big()")
    clean.run("_ = 'mine'\n_77 = 'mine, too'")
    asked(clean, "%memclean --free out")
    assert clean.value("(_, _77)") == "('mine', 'mine, too')"
    clean.run("del _, _77")


def test_what_a_variable_holds_too_is_no_gain(clean: Kernel) -> None:
    clean.run("mine = big()\nmine")
    assert "Nothing to gain" in asked(clean, "%memclean").text
    freed = asked(clean, "%memclean --free out")
    assert "Nothing was freed" in freed.text
    assert alive(clean) == 1
    clean.run("del mine")
    assert alive(clean) == 0


def test_an_error_and_an_output_that_hold_the_same_are_freed_together(clean: Kernel) -> None:
    number = clean.run("big()").count
    clean.run(f"def f(mine):\n    raise ValueError\nf(Out[{number}])")
    shown = " ".join(asked(clean, "%memclean").text.split())
    assert "fix `%memclean --free`" in shown
    assert clean.value("[one.alone_bytes for one in m.holdings]") == "[0, 0]"
    assert clean.value("m.together_bytes") == "16777216"
    asked(clean, "%memclean --free exception")
    assert alive(clean) == 1
    asked(clean, "%memclean --free out")
    assert alive(clean) == 0


@on_both_stacks
def test_a_debugger_that_was_left_is_found(clean: Kernel) -> None:
    clean.run(FAILURES["plain"])
    clean.run("%debug")  # without a keyboard it cannot go on, and is left where it stands
    clean.run("1 / 0")
    found = asked(clean, "%memclean")
    if not alive(clean):
        return  # this IPython's debugger lets go of it by itself
    assert "debugger" in found.text
    asked(clean, "%memclean --free")
    assert alive(clean) == 0


def test_cycles_are_freed_and_counted(clean: Kernel) -> None:
    clean.run("import gc; gc.disable()\nclass Node: pass\nnode = Node(); node.me = node; node.data = big()\ndel node")
    assert alive(clean) == 1
    asked(clean, "%memclean --free cycles")
    clean.run("gc.enable()")
    assert alive(clean) == 0
    assert clean.value("[(one.name, one.freed_bytes) for one in m.freed]") == "[('cycles', 16777216)]"


def test_nothing_is_said_to_be_nothing(clean: Kernel) -> None:
    assert "Nothing to clean" in asked(clean, "%memclean").text


def test_a_few_bytes_are_not_worth_it(clean: Kernel) -> None:
    clean.run("torch.ones(3)")
    assert "Nothing worth freeing" in asked(clean, "%memclean").text
    asked(clean, "%memclean --free")


def test_wrong_use_is_one_line_and_frees_nothing(clean: Kernel) -> None:
    clean.run("big()")
    for cell, said in (
        (
            "%memclean --free everything",
            "--free takes all, cycles, exception, debugger, out, session, heap, cache, or an output such as Out[3], not 'everything'",
        ),
        ("%memclean everything", "takes no value such as 'everything'"),
        ("%%memclean\nmine = 1", "%memclean stands on a line of its own: it watches no cell"),
    ):
        ran = clean.run(cell)
        assert ran.text.startswith("UsageError: ")
        assert said in ran.text
        assert "\n" not in ran.text.strip()
    assert alive(clean) == 1
    assert clean.run("mine").ename == "NameError"


def test_the_function_does_the_same(clean: Kernel) -> None:
    clean.run("big()")
    clean.run("import torchdebug_magics\nreport = torchdebug_magics.memclean(free='out')")
    assert alive(clean) == 0
    assert clean.value("report.freed_bytes") == "16777216"


def test_no_number_of_a_cell_and_no_state_of_the_random_generator_is_used_up(clean: Kernel) -> None:
    first = clean.run("state = torch.get_rng_state()").count
    asked(clean, "%memclean --free")
    assert clean.run("pass").count == first + 2
    assert clean.value("bool((state == torch.get_rng_state()).all())") == "True"


def test_what_a_session_of_ours_keeps_is_held_by_it_and_by_its_error(clean: Kernel) -> None:
    ran = clean.run("%%nanhunt -q\ndef f():\n    mine = big().sub_(2).requires_grad_()\n    torch.log(mine).sum().backward()\nf()")
    assert ran.ename == "NonFiniteError"
    asked(clean, "%memclean")
    assert clean.value("sorted(one.name for one in m.holdings)") == "['exception', 'session']"
    asked(clean, "%memclean --free exception")
    assert alive(clean) == 1
    asked(clean, "%memclean --free session")
    assert alive(clean) == 0
    assert clean.value("__import__('torchdebug_magics').last_session()") == "None"


def test_a_namespace_that_the_user_has_made_strange_is_no_obstacle(clean: Kernel) -> None:
    clean.run("big()")
    clean.run("globals()[3] = 1; _oh = 5")
    assert re.search(r" holds? [\d.]+ MiB", asked(clean, "%memclean").text)
    assert asked(clean, "%memclean --free out").status == "ok"
    clean.run("del globals()[3]; _oh = Out; Out.clear()")
    assert alive(clean) == 0
