"""Corners: where two causes meet, where a value is healed on one way and not on the other, where the line is far from the model."""

from tests.nan_cases.case import Case, Expect

CASES = (
    Case(
        name="corner_scheduler_makes_the_rate_nan",
        setup="""
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: float("nan") if e == 2 else 1.0)
            x = torch.rand(3, 2)
        """,
        cell="""
            for _ in range(4):
                loss = net(x).square().mean()
                opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        """,
        truth=Expect(kind="nan", phase="optimizer", step=2, backward=3, tensor=frozenset({"weight", "bias"})),
    ),
)
