"""Special functions, linear algebra, spectra, complex numbers, distributions: the poles that experts meet."""

from tests.nan_cases.case import Case, Expect

_IDENTITY = """
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
_UPDATE = """
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def _loss(name: str, line: str, x: str, truth: Expect, *, setup: str = "", before: str = "") -> Case:
    """One step of a model that passes its input on, with a loss of one marked line."""
    lines = [f"    x = {x}", *(f"    {one}" for one in setup.splitlines())]
    cell = ["    h = model(x)", *(f"    {one}" for one in before.splitlines()), f"    {line}  # <- here"]
    return Case(name=name, setup=_IDENTITY + "\n".join(lines), cell="\n".join(cell) + _UPDATE, truth=truth)


CASES = (
    _loss(
        "science_hyperbolic_distance_of_a_point_to_itself",
        "loss = torch.acosh(1 + 2 * gap / (1 - h.square().sum(1))).mean()",
        "torch.tensor([[0.1, 0.2], [0.3, 0.1]])",
        Expect(kind=frozenset({"nan", "inf"}), phase="backward", op="acosh", module=None, rows=(1,), diagnosis="pole"),
        setup="y = torch.tensor([[0.5, 0.2], [0.3, 0.1]])",
        before="gap = (h - y).square().sum(1)",
    ),
    _loss(
        "science_logaddexp_of_two_impossible_events",
        "loss = torch.logaddexp(blocked[:, 0], blocked[:, 1])[keep].sum()",
        "torch.tensor([[0.5, 0.5], [0.1, -0.3]])",
        Expect(kind="nan", phase="backward", op="logaddexp", module=None, rows=(1,)),
        setup="keep = torch.tensor([True, False])\nwall = torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]])",
        before="blocked = h + wall",
    ),
)
