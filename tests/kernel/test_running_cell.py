"""The body behaves exactly as if the magic line were not there: each cell is measured against the plain one, on both stacks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel, Ran

pytestmark = on_both_stacks

# A cell is `FIRST` and a body. Plain, its first line is a comment, so that every line has the same number.
PLAIN = "# nothing"

# --- the same as in a plain cell

SAME = {
    "value": "1 + 1",
    "value of none": "None",
    "no value": "x = 1",
    "semicolon silences": "x = 5\nx;",
    "semicolon and a comment": "5; # said",
    "underscore": "41 + 1\nassert _ is not None",
    "display": "from IPython.display import display\ndisplay('a')\n'b'",
    "print": "print('a')\nimport sys\nprint('b', file=sys.stderr)",
    "assignment": "fresh = 7",
    "global in a function": "def f():\n    global made\n    made = 3\nf()\nmade",
    "comprehension sees the namespace": "k = 3\n[k * i for i in range(3)]",
    "closure in a lambda": "k = 4\n(lambda: k)()",
    "error": "x = 1\n\n1 / 0",
    "error in a function": "def f():\n    return [][1]\n\nf()",
    "error in the first line": "undefined_name",
    "error in the last of many": "for i in range(3):\n    print(i)\n    if i == 2:\n        raise KeyError('two')",
    "chained error": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('after') from e",
    "error in an earlier cell's function": "assert callable(earlier)\nearlier()",
    "exception group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "error with a note": "e = ValueError('x')\ne.add_note('noted')\nraise e",
    "assertion": "assert 1 == 2, 'no'",
    "SystemExit": "import sys\nsys.exit(3)",
    "exit with no code": "raise SystemExit",
    "KeyboardInterrupt raised": "raise KeyboardInterrupt",
    "GeneratorExit raised": "raise GeneratorExit('x')",
    "BaseException": "class B(BaseException): pass\nraise B('b')",
    "syntax error": "x = 1\nif x\n    y",
    "syntax error in the last line": "print('never')\nx = (",
    "bad indentation": "def f():\nreturn 1",
    "return outside": "print('maybe')\nreturn 1",
    "break outside": "break",
    "await": "import asyncio\nawait asyncio.sleep(0.01)\n'woken'",
    "await, semicolon": "import asyncio\nawait asyncio.sleep(0.01)\n5;",
    "await, error": "import asyncio\nawait asyncio.sleep(0)\n\n1 / 0",
    "async for": "async def g():\n    yield 1\n    yield 2\nasync for i in g():\n    print(i)",
    "async with": "import contextlib\n@contextlib.asynccontextmanager\nasync def c():\n    yield 9\nasync with c() as v:\n    print(v)\nv",
    "await in a comprehension": "async def f(i): return i\n[await f(i) for i in range(3)]",
    "task": "import asyncio\nasync def f(): return 'task'\nt = asyncio.ensure_future(f())\nawait t",
    "magic on a line": "%pwd\n1",
    "magic assigned": "here = %pwd\nlen(here) > 0",
    "magic in a loop": "for i in range(2):\n    %alias_magic -l p pwd",
    "shell command": "!echo hi",
    "shell command assigned": "v = !echo hi\nlist(v)",
    "shell expansion": "word = 'hello'\n!echo {word} $word",
    "help on a name": "len?",
    "multi-line string": "s = '''a\n%%one\n  b'''\ns",
    "string with a backslash": "s = 'a\\\n b'\ns",
    "string of percent": "'%%one'",
    "tabs": "if True:\n\tz = 3\nz",
    "unicode": "π = 'ünïcode ✓'\nπ",
    "decorator": "import functools\n@functools.lru_cache\ndef f():\n    return 1\nf()",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\nP(3)",
    "annotations": "a: int = 3\n__annotations__.get('a') if '__annotations__' in globals() else int",
    "class": "class A:\n    x = 1\n    y = [x for _ in range(2)] if False else 2\nA.y",
    "getsource of a function": "import inspect\ndef g(a):\n    # comment\n    return a\nprint(inspect.getsource(g))",
    "getsource of a lambda": "import inspect\nh = lambda a: a + 1\nprint(inspect.getsource(h))",
    "line number of a function": "def g():\n    pass\ng.__code__.co_firstlineno",
    "line number now": "import sys\nsys._getframe().f_lineno",
    "__name__": "__name__, __builtins__ is not None",
    "pickle by reference": "import pickle\nclass Q: pass\ntype(pickle.loads(pickle.dumps(Q()))).__name__",
    "warning": "import warnings\nwarnings.warn('careful')\nwarnings.warn('again', DeprecationWarning)",
    "logging": "import logging\nlogging.getLogger('x').warning('logged')",
    "future import": "from __future__ import annotations\ndef f(a: nowhere): ...\nf.__annotations__",
    "future import too late": "x = 1\nfrom __future__ import annotations",
    "nested run_cell": "get_ipython().run_cell('q = 5').success, q",
    "nested run_cell with an error": "get_ipython().run_cell('1/0').success",
    "exec": "exec('m = 2')\nm",
    "eval of a name": "n = 6\neval('n + 1')",
    "locals is globals": "locals() is globals()",
    "del": "d = 1\ndel d\n'd' in globals()",
    "walrus": "(w := 8)",
    "star expression": "a, *b = range(4)\nb",
    "match": "match 3:\n    case 3:\n        r = 'three'\nr",
    "generator left open": "def gen():\n    try:\n        yield 1\n    finally:\n        print('closed')\nit = gen()\nnext(it)\ndel it",
    "thread": "import threading\nt = threading.Thread(target=print, args=('from a thread',))\nt.start()\nt.join()",
    "recursion": "def r(): return r()\ntry:\n    r()\nexcept RecursionError:\n    print('deep')",
    "repr that fails": "class R:\n    def __repr__(self): raise ValueError('no repr')\nR()",
    "input": "input('? ')",
    "stdout redirected": "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as s:\n    print('x')\ns.getvalue()",
    "comment alone": "# just this",
    "comment at the end": "3\n# end",
    "empty": "",
    "blank lines": "\n\n\n",
    "blank lines first": "\n\n1 / 0",
    "unknown line magic": "%nosuchmagic\n1",
    "set_trace is untouched": "import sys\nsys.gettrace() is None",
    "excepthook": "import sys\nsys.excepthook.__name__",
}

# Another's cell magic: it must stand first, so that the plain cell is the body alone.
BELOW = {
    "%%capture": "%%capture captured\nprint('x')\n7",
    "%%capture, error": "%%capture captured\nprint('inside')\n1 / 0",
    "%%bash": "%%bash\necho from bash",
    "%%writefile": "%%writefile written.txt\ntext\n%%one\n",
    "%%python": "%%python\nprint('another python')",
    "unknown": "%%nosuchmagic\n1",
    "help": "%%time?\n",
}

# What differs from run to run in a plain cell too.
NOISE = (
    (re.compile(r"ipykernel_\d+/\d+\.py|<ipython-input-\S+>"), "CELL"),
    (re.compile(r"\(\d+\.py, line|/\S+/ipykernel_\S+"), "(CELL, line"),
    (re.compile(r"Cell In\[\d+\]|In \[\d+\]|<cell line: \d+>"), "CELL"),
    (re.compile(r"0x[0-9a-f]+"), "0x"),
    (re.compile(r"^(\S*\s*1 |\S*\s*1: ).*(# nothing|# %%|run_cell_magic).*$", re.MULTILINE), r"\1FIRST"),
    (re.compile(r"^.*(# nothing|# %%(one|two)|run_cell_magic\('(one|two)').*$", re.MULTILINE), "FIRST"),
)


@pytest.mark.parametrize("body", SAME.values(), ids=SAME)
def test_as_if_the_magic_line_were_not_there(kernel: Kernel, body: str) -> None:
    same(kernel, "%%one -q", PLAIN, body)


STACKED = ("value", "error", "syntax error", "await", "await, error", "KeyboardInterrupt raised", "multi-line string", "future import")


@pytest.mark.parametrize("first", ["%%one -q\n%%two -q", "# why\n%%two -q", "%%one -q\n\n%%two -q"], ids=["two", "comment", "blank line"])
@pytest.mark.parametrize("name", STACKED)
def test_as_if_several_lines_were_not_there(kernel: Kernel, name: str, first: str) -> None:
    same(kernel, first, re.sub(r"%%.*", PLAIN, first), SAME[name])


@pytest.mark.parametrize("body", BELOW.values(), ids=BELOW)
def test_as_if_alone_above_another_cell_magic(kernel: Kernel, body: str) -> None:
    kernel.run(body)  # so that both find the file that one of them writes
    expected, found = kernel.run(body), kernel.run(f"%%one -q\n{body}")
    assert seen(found) == seen(expected)
    assert kernel.value("open_now") == "[]"


def same(kernel: Kernel, first: str, plain: str, body: str) -> None:
    if "earlier" in body:
        kernel.run("def earlier():\n    raise LookupError('there')")
    names = "sorted(n for n in globals() if not n.startswith('_'))"
    expected = kernel.run(f"{plain}\n{body}")
    known = kernel.value(names)
    found = kernel.run(f"{first}\n{body}")
    assert seen(found) == seen(expected)
    assert kernel.value(f"({names}, open_now)") == f"({known}, [])"
    assert found.count == expected.count + 2


def seen(ran: Ran) -> dict[str, object]:
    return {
        "status": ran.status,
        "error": (ran.ename, quiet(ran.evalue)),
        "outputs": [(out["kind"], out.get("name"), {mime: quiet(str(text)) for mime, text in out["data"].items()}) for out in ran.outputs],
        "pages": [quiet(str(page.get("data", page))) for page in ran.payload],
    }


def quiet(text: str) -> str:
    for pattern, shown in NOISE:
        text = pattern.sub(shown, text)
    return text
