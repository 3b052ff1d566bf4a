"""Orders that nobody promises, of sets, folders and finished work: told with the line, and only where they matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.deterministic.planted import IMPORTS

if TYPE_CHECKING:
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.instruments.deterministic.report import DeterministicReport

TOLD = {
    "a set that is numbered": (
        "words = ['b', 'a', 'c']",
        "places = {w: i for i, w in enumerate(set(words))}  # <-\nx = torch.tensor([places[w] for w in words]) * 2",
        "sorted(set(words))",
    ),
    "in a method, in a loop": (
        """\
class Vocabulary:
    def __init__(self, texts):
        self.at = {}
        for word in set(' '.join(texts).split()):  # <-
            self.at[word] = len(self.at)
""",
        "v = Vocabulary(['a b', 'c a'])\nx = torch.tensor([v.at[w] for w in 'abc']) * 2",
        "sorted(",
    ),
    "an intersection": (
        "one, two = ['a.png', 'b.png', 'c.png'], ['c.png', 'a.png']",
        "names = list(set(one) & set(two))  # <-\nx = torch.tensor([float(ord(n[0])) for n in names]).cumsum(0)",
        "sorted(set(one) & set(two))",
    ),
    "the hash of a string": ("name = 'first'", "torch.manual_seed(hash(name) % 2**31)  # <-\nx = torch.rand(2)", "zlib.crc32"),
    "one that is taken out of a set": (
        "words = ['b', 'a', 'c']",
        "left = set(words)\nx = torch.tensor([float(ord(left.pop()))]) * 2  # <-",
        "replace `left.pop()` with `min(left)`, and remove that element",
    ),
    "files of a folder": (
        "for name in 'abc': (Path(name) / '').with_suffix('.txt').write_text(str(ord(name)))",
        "x = torch.tensor([float(Path(name).read_text()) for name in os.listdir('.')])  # <-\ny = x.cumsum(0)",
        "sorted(os.listdir('.'))",
    ),
    "files of a pattern, in a function": (
        "import glob\nfor name in 'abc': Path(name + '.txt').write_text(str(ord(name)))\ndef paths():\n    return glob.glob('*.txt')  # <-",
        "y = torch.tensor([float(open(path).read()) for path in paths()]).cumsum(0)",
        "sorted(glob.glob('*.txt'))",
    ),
    "futures": (
        "from concurrent.futures import ThreadPoolExecutor, as_completed",
        """\
with ThreadPoolExecutor(1) as pool:
    jobs = [pool.submit(float, i) for i in range(4)]
    values = [job.result() for job in as_completed(jobs)]  # <-
y = torch.tensor(values).cumsum(0)
""",
        "in submission order",
    ),
}
HEALTHY = {
    "sorted": (
        "labels = ['cat', 'dog']",
        """\
kinds = list(set(labels))
kinds.sort()
n = len(list(set(labels)))
all_kinds = sorted([one for one in set(labels)])
x = torch.ones(n) * 2
""",
    ),
    "numbers": ("labels = [1, 2, 3]", "x = torch.tensor(list(set(labels))) * 2\nis_there = 'a' in {'a', 'b'}\nn = hash((1, 2))"),
}
SALT = "torchdebug_magics.instruments.deterministic.ritual.status.began_with"


def verified(shell: InteractiveShell, setup: str, body: str) -> DeterministicReport:
    shell.run_cell(IMPORTS + "from pathlib import Path\n" + setup, store_history=True).raise_error()
    shell.run_cell(f"%%deterministic --verify -q -o d\n{body}", store_history=True).raise_error()
    report: DeterministicReport = shell.user_ns["d"]
    assert report.problems == ()
    return report


@pytest.fixture(autouse=True)
def salted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(SALT, lambda _name: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", TOLD)
def test_it_is_told_with_its_line(shell: InteractiveShell, name: str) -> None:
    setup, body, fix = TOLD[name]
    found = verified(shell, setup, body)
    told = next(one for one in found.depends_on if one.on == "order")
    assert told.location is not None
    assert told.location.source.endswith("# <-"), told
    assert fix in told.fix


@pytest.mark.parametrize("name", HEALTHY)
def test_it_is_not_told_where_it_does_not_matter(shell: InteractiveShell, name: str) -> None:
    found = verified(shell, *HEALTHY[name])
    assert found.verified
    assert not [one for one in found.depends_on if one.on == "order"]


@pytest.mark.parametrize(
    "body",
    ["torch.manual_seed(os.getpid())  # <-\nx = torch.rand(2)", "x = torch.ones(2)\ny = x * os.getpid()  # <-"],
    ids=["seed", "factor"],
)
def test_the_number_of_the_process_is_another_one_in_the_next(shell: InteractiveShell, body: str) -> None:
    found = verified(shell, "", body)
    (told,) = found.depends_on
    assert (told.on, told.what, told.location and told.location.source.endswith("# <-")) == (
        "entropy",
        "`os.getpid()` differs in each process",
        True,
    )
    assert "Same numbers in this process, different ones in the next" in found.verdict


def test_a_fixed_salt_is_the_same_in_each_process(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SALT, lambda _name: "0")
    assert verified(shell, *TOLD["a set that is numbered"][:2]).depends_on == ()


def test_objects_in_a_set_stand_by_their_addresses(shell: InteractiveShell) -> None:
    setup = "torch.manual_seed(0)\nnets = [nn.Linear(2, 2) for _ in range(6)]"
    body = """\
layers = [nn.Linear(2, 2, bias=False) for _ in range(40)]
for number, layer in enumerate(layers):
    nn.init.constant_(layer.weight, number / 40)
x = torch.ones(2)
for layer in set(layers):  # <-
    x = torch.tanh(layer(x))
"""
    found = verified(shell, setup, body)
    if not found.verified:  # the addresses may be the same by chance
        (told,) = found.depends_on
        assert told.on == "order"
        assert "list" in told.fix
