"""Births in forward ops outside every module."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

CASES = (
    Case(
        name="loss_all_labels_ignored",
        setup="""
            model = nn.Linear(4, 3)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 4)
            labels = [torch.tensor([0, 1, 2, -100]), torch.tensor([1, 1, -100, -100]), torch.full((4,), -100)]
        """,
        cell="""
            for y in labels:
                loss = F.cross_entropy(model(x), y)  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="nll_loss_forward", module=None, step=2, rows=(), diagnosis=slugs.ALL_IGNORED),
    ),
    Case(
        name="loss_all_labels_ignored_own_index_in_2d",
        setup="""
            model = nn.Conv2d(1, 3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(2, 1, 3, 3)
            masks = [torch.randint(0, 3, (2, 3, 3)), torch.full((2, 3, 3), 255)]
        """,
        cell="""
            for target in masks:
                logits = model(x)
                loss = F.cross_entropy(  # <- here
                    logits,
                    target,
                    ignore_index=255,
                )
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="nll_loss2d_forward", module=None, step=1, rows=(), diagnosis=slugs.ALL_IGNORED),
    ),
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
        name="loss_infeasible_ctc",
        setup="""
            model = nn.Linear(3, 5)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(6, 2, 3)
            targets = torch.tensor([[1, 2, 0], [3, 3, 3]])
            input_lengths, target_lengths = torch.tensor([6, 4]), torch.tensor([2, 3])
        """,
        cell="""
            log_probs = model(x).log_softmax(-1)
            loss = F.ctc_loss(log_probs, targets, input_lengths, target_lengths)  # <- here
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="_ctc_loss", module=None, rows=(1,), diagnosis=slugs.CTC),
    ),
    Case(
        name="loss_kl_of_a_zero_probability",
        setup="""
            student = nn.Linear(3, 3)
            opt = torch.optim.SGD(student.parameters(), lr=0.1)
            x = torch.randn(4, 3)
            teacher = torch.softmax(torch.randn(4, 3), -1)
            teacher[2] = torch.tensor([0.0, 0.5, 0.5])
        """,
        cell="""
            q = torch.softmax(student(x), -1)
            loss = (teacher * (teacher.log() - q.log())).sum(-1).mean()  # <- here
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, rows=(2,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="loss_nested_function_in_the_cell",
        setup="""
            model = nn.Linear(3, 2)
            opt = torch.optim.Adam(model.parameters())
            x = torch.randn(4, 3)
        """,
        cell="""
            def make_criterion(power):
                def distance(a, b):
                    gap = (a - b).sum(1)
                    return gap ** power  # <- here

                def criterion(out):
                    return distance(out, out.roll(1, 0)).mean()

                return criterion

            criterion = make_criterion(0.5)
            loss = criterion(model(x))
            loss.backward()
            opt.step()
        """,
        # Of differences around a ring some are negative: their root is NaN.
        truth=Expect(kind="nan", phase="loss", op="pow", module=None, rows=(1, 3)),
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
    Case(
        name="loss_logit_of_one",
        setup="""
            model = nn.Sequential(nn.Linear(1, 1), nn.Sigmoid())
            with torch.no_grad():
                model[0].weight.fill_(1.0); model[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-4)
            x = torch.tensor([[0.5], [30.0], [-0.5]])
        """,
        cell="""
            p = model(x)
            z = torch.logit(p)  # <- here
            loss = z.mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="logit", module=None, rows=(1,)),
    ),
)
