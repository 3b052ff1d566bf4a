"""Gradients that `torch.func` takes: no backward() is called, and nothing is kept in `.grad`."""

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
    _case(
        "of_each_sample",
        "torch.log(out.abs() * k)",
        """
        for t in range(3):
            x, k = torch.rand(5, 3), torch.ones(5)
            if t == 1: k[3] = 0
            slopes = torch.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(params, x, k)
            params = {name: params[name] - 0.01 * slopes[name].mean(0) for name in params}
        """,
        Expect(kind="inf", phase="loss", op="log", module=None, step=0, backward=1, rows=(3,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="function_number_written_into_a_row",
        setup="net = nn.Linear(3, 2)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)",
        cell="""
            for t in range(3):
                out = net(torch.rand(4, 3)).clone()
                if t == 1:
                    out[2, 0] = math.nan  # <- here
                loss = out.mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op=frozenset({"copy_", "fill_"}), module=None, step=1, rows=(2,), diagnosis="nan_constant"),
    ),
    Case(
        name="function_number_written_into_the_data",
        setup="net = nn.Linear(3, 2)",
        cell="""
            x = torch.rand(4, 3)
            x[3, 1] = math.nan
            out = net(x)
            loss = out.mean()
            loss.backward()
        """,
        truth=Expect(kind="nan", phase="data", op=None, rows=(3,), tensor="x", diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="function_row_divided_in_place",
        setup="net = nn.Linear(3, 4)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)",
        cell="""
            for t in range(3):
                out = net(torch.rand(4, 3)).clone()
                out[2] /= 0 if t == 1 else 1  # <- here
                loss = out.mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="div_", module=None, step=1, rows=(2,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="function_of_an_infinite_number",
        setup="net = nn.Linear(3, 2)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)",
        cell="""
            for t in range(3):
                out = net(torch.rand(4, 3))
                loss = (out * (math.inf if t == 2 else 1.0)).mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="mul", module=None, step=2, diagnosis="inf_constant"),
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
