"""The same few bugs inside every shape of training loop."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

CASES = (
    Case(
        name="flow_next_inside_the_model_call",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            stream = [torch.rand(4, 3) + 0.5 for _ in range(7)]
            stream[4][2] = 0.0
            model.bias.data.zero_()
            it = iter(stream)
        """,
        cell="""
            for step in range(7):
                out = model(next(it))
                loss = (out - model.bias).abs().sqrt().mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=4, rows=(2,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="flow_autograd_grad_with_a_bad_loss",
        setup="""
            model = nn.Linear(2, 2)
            opt = torch.optim.Adam(model.parameters())
            data = [torch.randn(3, 2).abs() + 1 for _ in range(4)]
            data[1][2, 0] = -4.0
        """,
        cell="""
            for x in data:
                root = model(x.sqrt())  # <- here
                loss = root.mean()
                grads = torch.autograd.grad(loss, tuple(model.parameters()))
                for p, g in zip(model.parameters(), grads):
                    p.grad = g
                opt.step()
        """,
        # Before the model call of the step: a replay from that call finds the data bad, one of the whole step finds sqrt.
        truth=Expect(
            kind="nan", phase=frozenset({"data", "loss"}), line=ANY, step=1, backward=frozenset({0, 1}), rows=(2,), reproduced=ANY
        ),
    ),
    Case(
        name="flow_keep_going_counts_every_bad_step",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            data = [torch.rand(3, 2) for _ in range(5)]
            data[1][0] = float("nan"); data[3][2] = float("nan")
        """,
        options={"keep_going": True},
        cell="""
            for x in data:
                out = model(x)
                loss = out.square().mean()
                opt.zero_grad()
                loss.backward()
                if torch.isfinite(loss):
                    opt.step()
        """,
        truth=Expect(
            kind="nan",
            phase="data",
            op=None,
            step=1,
            rows=(0,),
            tensor=frozenset({"x", "input"}),
            diagnosis=slugs.BAD_ROW,
            count=1,
            bad_steps=(1, 2),
        ),
    ),
)
