"""Births in forward ops outside every module."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

CASES = (
    Case(
        name="loss_own_cross_entropy_log_of_softmax",
        setup="""
            def nll(logits, target):
                probs = torch.softmax(logits, -1)
                picked = probs.gather(1, target[:, None])
                return -torch.log(picked).mean()  # <- here
            model = nn.Linear(2, 2)
            with torch.no_grad():
                model.weight.copy_(torch.tensor([[50.0, 0.0], [0.0, 50.0]])); model.bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-4)
            x = torch.tensor([[0.1, 0.0], [0.0, 0.1], [4.0, -4.0]])
            targets = [torch.tensor([0, 1, 0]), torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1])]
        """,
        cell="""
            for target in targets:
                opt.zero_grad()
                loss = nll(model(x), target)
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=2, rows=(2,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="loss_second_statement_of_a_line",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [torch.rand(4, 3) for _ in range(4)]
            scale = [2.0, 1.0, 0.0, 1.0]
        """,
        cell="""
            for x, s in zip(batches, scale):
                opt.zero_grad(); out = model(x); loss = (out / s).pow(2).mean(); loss.backward(); opt.step()  # <- here
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, step=2, rows=(0, 1, 2, 3), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="loss_from_an_imported_file",
        files={
            "focal_helper.py": """
                import torch


                def focal(p, target, gamma=2.0):
                    pt = torch.where(target > 0, p, 1 - p)
                    weight = (1 - pt) ** gamma
                    return -(weight * pt.log()).mean()  # <- here
            """,
        },
        setup="""
            from focal_helper import focal
            model = nn.Linear(1, 1)
            with torch.no_grad():
                model.weight.fill_(1.0); model.bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-6)
            batches = [torch.tensor([[1.0], [-1.0]]), torch.tensor([[40.0], [2.0]])]
            target = torch.tensor([[0], [1]])
        """,
        cell="""
            for x in batches:
                loss = focal(torch.sigmoid(model(x)), target)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=1, rows=(0,), diagnosis=slugs.LOG_ZERO),
    ),
)
