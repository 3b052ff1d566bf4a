"""Windows that the end of their sequence cuts short, and indices that have no item: the bound is lowered, and the edit applied runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.watch.test_after_errors import IMPORTS, asked

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

WINDOWS = """\
class Windows(Dataset):
    def __init__(self, data, length):
        self.data, self.length = data, length
    def __len__(self):
        return len(self.data)
    def __getitem__(self, i):
        {item}
loader = DataLoader(Windows(torch.randn(100, 1), 10), batch_size=16)
"""
OF_A_DATASET = {
    "return self.data[i : i + self.length]": "return len(self.data) - self.length + 1",
    "return self.data[i : i + self.length], self.data[i + self.length]": "return len(self.data) - self.length",
    "return self.data[i : i + self.length], self.data[i + 1 : i + 1 + self.length]": "return len(self.data) - self.length",
    "start = i * self.length; end = start + self.length; return self.data[start:end]": "return len(self.data) // self.length",
}


@pytest.mark.parametrize("item", OF_A_DATASET)
def test_a_dataset_ends_with_its_last_whole_window(item: str, shell: InteractiveShell) -> None:
    answer = asked(shell, IMPORTS + WINDOWS.format(item=item), "for batch in loader:\n    pass")
    assert answer.report.fix == f"write `{OF_A_DATASET[item]}`"
    assert "`Windows.__len__` returns 100" in answer.report.verdict
    assert answer.result.success


SERIES = "series, seq = torch.randn(100), 12\nX = torch.zeros(100, seq)"
TEXT = """\
import random
random.seed(1)
def chunk():
    start = random.randint({low}len(text) - size)
    end = start + size + 1
    part = text[start:end]
    made = torch.zeros(size)
    made[:] = torch.tensor([float(letter) for letter in part[1:]])
    return made
text, size = "0123456789" * 3, 20
"""
BLOCKS = """\
def get_batch():
    ix = torch.randint(len(data) - 1, (32,))
    x = torch.stack([data[i:i + block] for i in ix])
    y = torch.stack([data[i + 1:i + block + 1] for i in ix])
    return x, y
data, block = torch.arange(200), 8
"""
OF_A_START = [
    (SERIES, "for i in range(len(series)):\n    X[i] = series[i:i + seq]", "range(len(series) - seq + 1)"),
    (SERIES, "for i in range(0, len(series), 1):\n    y = series[i + seq]", "range(0, len(series) - seq, 1)"),
    (TEXT.format(low="0, "), "for _ in range(200): chunk()", "random.randint(0, len(text) - size - 1)"),
    (BLOCKS, "for _ in range(20): x, y = get_batch()", "torch.randint(len(data) - block, (32,))"),
]


@pytest.mark.parametrize(("before", "cell", "fix"), OF_A_START)
def test_a_start_is_drawn_from_those_with_a_whole_window(before: str, cell: str, fix: str, shell: InteractiveShell) -> None:
    answer = asked(shell, IMPORTS + before, cell)
    assert answer.report.fix == f"write `{fix}`", answer.report.verdict
    assert answer.result.success


OTHERS = {
    "in several loops": "for row in range(4):\n    for column in range(4):\n        value = series[row * 40 + column]",
    "where another list is longer": "names = list(range(120))\nfor i in range(len(names)):\n    value = series[i]",
    "a preview that is shorter than asked": "print(series[:500].shape)\ny = torch.zeros(100) + torch.zeros(30)",
}


@pytest.mark.parametrize("cell", OTHERS.values(), ids=OTHERS)
def test_no_bound_is_lowered_where_another_number_may_be_at_fault(cell: str, shell: InteractiveShell) -> None:
    report = asked(shell, IMPORTS + SERIES, cell).report
    assert "range(" not in (report.fix or ""), report.verdict
    assert "instead of 500" not in report.verdict


LAST_BATCH = """\
rnn, data = nn.GRU(1, 4, batch_first=True), torch.randn(40, 6, 1)
for at in range(0, len(data), 16):
    batch = data[at:at + 16]
    out = rnn(batch, torch.zeros(1, 16, 4))
"""
NO_WORD = "table, words = nn.Embedding(20, 4), torch.arange(24)\nfor at in range(0, 24, 16):\n    row = table(words[at:at + 16])"


@pytest.mark.parametrize("cell", [LAST_BATCH, NO_WORD])
def test_a_smaller_last_batch_is_no_window(cell: str, shell: InteractiveShell) -> None:
    report = asked(shell, IMPORTS, cell).report
    assert "range(" not in (report.fix or ""), report.verdict


SAMPLES = "net, x, y = nn.Sequential(nn.Linear({}, 3), nn.Linear(3, 1)), torch.randn(40), torch.randn(40)"


def test_a_model_is_not_made_for_as_many_features_as_there_are_samples(shell: InteractiveShell) -> None:
    report = asked(shell, IMPORTS + SAMPLES.format(2), "net(x)").report
    assert "one number for each of the samples that `y` has" in report.verdict
    assert not report.edits
    assert asked(shell, SAMPLES.format(1), "net(x)").result.success  # of one feature
