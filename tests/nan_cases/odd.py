"""Odd ways to run a step: tasks, callbacks, partial backwards, gradients that `torch.func` takes, parts of torch that few use."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect, Nothing, Truth

_SETUP = """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
params = {name: one.detach().clone() for name, one in net.named_parameters()}
def loss_of(params, x, k):
    out = torch.func.functional_call(net, params, (x,))
    return @.mean()  # <- here
"""
_DESCENT = """
for t in range(4):
    x = torch.rand(5, 3)
    slopes = torch.func.grad(loss_of)(params, x, 0.0 if t == 2 else 1.0)
    params = {name: params[name] - 0.01 * slopes[name] for name in params}
"""


def _case(name: str, value: str, cell: str, truth: Truth) -> Case:
    return Case(name=f"function_{name}", setup=_SETUP.replace("@", value), cell=cell, truth=truth)


CASES = (
    Case(
        name="odd_async_training",
        setup="""
            import asyncio
            net = nn.Linear(2, 2, bias=False)
            nn.init.eye_(net.weight)
            opt = torch.optim.SGD(net.parameters(), lr=0.0)
            queue = [torch.rand(2, 2) + 1 for _ in range(3)]
            queue[1][1] = torch.tensor([1.0, 0.0])
        """,
        cell="""
            async def train():
                for x in queue:
                    await asyncio.sleep(0)
                    loss = net(x).log().square().mean()  # <- here
                    opt.zero_grad(); loss.backward(); opt.step()
            coroutine = train()
            try:
                while True:
                    coroutine.send(None)
            except StopIteration:
                pass
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=1, rows=(1,), diagnosis=slugs.LOG_ZERO),
    ),
    _case(
        "nothing_wrong",
        "torch.log(out.abs() + k)",
        _DESCENT.replace("0.0 if t == 2 else 1.0", "1.0"),
        Nothing(backwards=4),
    ),
    _case(
        "quiet_other_transforms",
        "(out * k)",
        """
        x = torch.rand(2, 3)
        value = lambda params: loss_of(params, x, 1.0)
        torch.func.jacrev(value)(params), torch.func.hessian(value)(params), torch.func.vjp(value, params)[1](torch.ones(()))
        torch.func.grad(lambda x: torch.func.grad(lambda y: (y ** 3).sum())(x).sum())(torch.rand(3))
        """,
        Nothing(backwards=1),
    ),
    _case("quiet_error", "out", "torch.func.grad(lambda x: x)(torch.rand(3))", Nothing(raises="RuntimeError")),
)
