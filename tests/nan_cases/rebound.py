"""Data that the step made, over what they were made of; parameters whose module is never called; steps that differ each time."""

from tests.nan_cases.case import ANY, Case, Expect, Truth

_NET = """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
X = torch.rand(12, 3) + 0.1
Y = torch.randint(2, (12,))
X[6] = 0
"""
_STEP = """
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
_DIV = Expect(kind="nan", phase="loss", op="div", module=None, step=1, rows=(2,), diagnosis="div_zero")
_LINE = Expect(kind="nan", phase="data", step=1, rows=(2,), diagnosis="bad_data_row")
"""What was written over is known of a loader's batch alone: of all others the line is named."""
_BY_LARGEST = "    x = x / x.amax(1, keepdim=True)  # <- here"


def _loop(name: str, head: str, setup: str = "", truth: Truth = _DIV, made: str = _BY_LARGEST) -> Case:
    """A loop whose body writes over what the loop gave it."""
    return Case(name=f"rebound_{name}", setup=_NET + setup, cell=f"{head}\n{made}{_STEP}", truth=truth)


_LOADER = "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)"
_NEXT = """
batches = iter(loader)
for _ in range(3):
    try:
        x, y = next(batches)
    finally:
        pass
""".strip()
_LOOPS = (
    _loop("counted_loader", "for i, (x, y) in enumerate(loader):", _LOADER),
    _loop("next_of_a_loader", _NEXT, _LOADER),
    _loop("workers", "for x, y in torch.utils.data.DataLoader(loader.dataset, batch_size=4, num_workers=1):", _LOADER),
    _loop("twice", "for x, y in loader:\n    x = x + torch.zeros(4, 1) * torch.rand(4, 1)\n    x = x * 2", _LOADER),
    _loop(
        "bad_from_the_loader",
        "for x, y in loader:",
        "X[9, 1] = math.nan\nX[6] = 1\n" + _LOADER,
        Expect(kind="nan", phase="data", step=2, rows=(1,), diagnosis="bad_data_row", line=ANY),
        "    x = x * 2 + 1",
    ),
)

_OTHERS = (
    Case(
        name="rebound_before_a_with",
        setup=_NET + _LOADER,
        cell="""
for x, y in loader:
    x = x / x.amax(1, keepdim=True)  # <- here
    with torch.autocast("cpu", enabled=False):
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        truth=_DIV,
    ),
    Case(
        name="rebound_argument",
        setup=_NET
        + """
def train(batch, labels):
    batch = batch / batch.amax(1, keepdim=True)  # <- here
    loss = F.cross_entropy(net(batch), labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        cell="""
for x, y in zip(X.split(4), Y.split(4)):
    train(x, y)
""",
        truth=_LINE,
    ),
    Case(
        name="rebound_dict_made_anew",
        setup=_NET + "rows = [dict(x=X[:4], n=torch.tensor([1, 2, 3, 4])), dict(x=X[:4], n=torch.tensor([1, 2, 0, 4]))]",
        cell="""
for row in rows:
    row = {name: value.float() for name, value in row.items()}
    weight = 1 / row["n"]  # <- here
    loss = net(row["x"] * weight[:, None]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        truth=Expect(kind="inf", phase="loss", op="reciprocal", module=None, step=1, rows=(2,), diagnosis="div_zero"),
    ),
    Case(
        name="rebound_module_never_called",
        setup="""
class Prior(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(()))
prior = Prior()
x = torch.randn(10)
opt = torch.optim.SGD(prior.parameters(), lr=0.01)
""",
        cell="""
for step in range(4):
    loss = (x * prior.raw.exp()).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step == 2:
        prior.raw.data.mul_(math.nan)
""",
        truth=Expect(kind="nan", phase="parameter", tensor="raw", step=3, spoilt_here=True, diagnosis="bad_parameter", line=ANY),
    ),
)

CASES = (*_LOOPS, *_OTHERS)
