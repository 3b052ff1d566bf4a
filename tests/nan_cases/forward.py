"""Births inside a module's forward."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

_LOOP = """
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

CASES = (
    Case(
        name="forward_zero_over_zero",
        setup="""
            class Normalise(nn.Module):
                def forward(self, x):
                    total = x.sum(1, keepdim=True)
                    return x / total  # <- here
            model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Normalise(), nn.Linear(4, 1))
            with torch.no_grad():
                model[0].bias.fill_(-0.1)
            opt = torch.optim.SGD(model.parameters(), lr=0.001)
            batches = [(torch.rand(4, 3) + 5, torch.randn(4, 1)) for _ in range(4)]
            model[0].weight.data.abs_()
            batches[2][0][3] = 0.0
        """,
        cell=_LOOP,
        truth=Expect(kind="nan", phase="forward", op="div", module="2", step=2, rows=(3,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="forward_linear_overflows",
        setup="""
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 1))
            with torch.no_grad():
                model[0].weight.fill_(1e20); model[1].weight.fill_(1e20)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.ones(4, 2)
        """,
        cell="""
            out = model(x)  # <- here
            loss = out.mean()
            loss.backward()
        """,
        truth=Expect(kind="inf", phase="forward", op="mm", module="1", rows=(0, 1, 2, 3)),
    ),
)
