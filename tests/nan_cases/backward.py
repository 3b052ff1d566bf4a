"""The forward was finite, or bad values were masked in it; a derivative was not."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

CASES = (
    Case(
        name="backward_hypot_at_the_origin",
        setup="""
            class Magnitude(nn.Module):
                def forward(self, x):
                    a, b = x.unbind(-1)
                    return torch.hypot(a, b)  # <- here
            model = nn.Sequential(nn.Linear(2, 2, bias=False), Magnitude())
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 2)
            x[0] = 0.0
        """,
        cell="""
            loss = model(x).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op="hypot", module="1", rows=(0,)),
    ),
    Case(
        name="backward_bad_custom_function",
        setup="""
            class Soft(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    ctx.save_for_backward(x)
                    return x.abs()
                @staticmethod
                def backward(ctx, grad):
                    x, = ctx.saved_tensors
                    return grad * x / x.abs()
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 3, bias=False)
                def forward(self, x):
                    return Soft.apply(self.lin(x)).sum(1)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [torch.randn(3, 2) for _ in range(3)]
            batches[1][2] = 0.0
        """,
        cell="""
            for x in batches:
                loss = model(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The op that the derivative belongs to has no ATen name; either line, of apply or in the user's backward, is true.
        truth=Expect(kind="nan", phase="backward", module="", line=ANY, step=1, rows=(2,)),
    ),
    Case(
        name="backward_gradient_overflows_along_a_chain",
        setup="""
            class Amplify(nn.Module):
                def forward(self, x):
                    return x * 1e15  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 1, bias=False)
                    self.amplify = Amplify()
                def forward(self, x):
                    x = self.lin(x) * 1e-36
                    return self.amplify(self.amplify(self.amplify(x)))
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=1e-30)
            x = torch.randn(3, 2)
        """,
        cell="""
            loss = model(x).sum()
            loss.backward()
            opt.step()
        """,
        # 1e15 to the third power is past float32, on the way back through the first of the three calls.
        truth=Expect(kind="inf", phase="backward", op="mul", module="amplify", call=1, rows=(0, 1, 2)),
    ),
    Case(
        name="backward_gradient_penalty",
        setup="""
            critic = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
            with torch.no_grad():
                critic[0].weight.abs_(); critic[0].bias.zero_(); critic[2].weight.abs_()
            opt = torch.optim.SGD(critic.parameters(), lr=1e-4)
            batches = [torch.rand(3, 2) + 0.1 for _ in range(3)]
            batches[2][1] = -5.0
        """,
        cell="""
            for x in batches:
                x = x.requires_grad_()
                score = critic(x)
                grad, = torch.autograd.grad(score.sum(), x, create_graph=True)
                norm = grad.square().sum(1).sqrt()  # <- here
                loss = score.mean() + 10 * (norm - 1).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=2, rows=(1,), diagnosis=slugs.SQRT_ZERO),
    ),
)
