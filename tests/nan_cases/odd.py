"""Odd ways to run a step: tasks, callbacks, partial backwards, gradients that `torch.func` takes, parts of torch that few use."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing, Truth

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
        name="odd_two_losses_in_one_backward_call",
        setup="""
            trunk, a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 1), nn.Linear(2, 1)
            opt = torch.optim.SGD([*trunk.parameters(), *a.parameters(), *b.parameters()], lr=0.1)
            x = torch.rand(3, 2); x[1] = 0.0
        """,
        cell="""
            h = trunk(x)
            l1 = a(h).square().mean()
            l2 = b(h).mean() + h.abs().sum(1).pow(0.5).mean()  # <- here
            torch.autograd.backward([l1, l2])
            opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="pow", module=None, rows=(1,), diagnosis=slugs.POW_ZERO),
    ),
    Case(
        name="odd_lstm_with_an_infinite_recurrent_weight",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.rnn, self.out = nn.LSTM(2, 3, num_layers=2, batch_first=True), nn.Linear(3, 1)
                def forward(self, x):
                    return self.out(self.rnn(x)[0][:, -1])
            net = Net()
            with torch.no_grad():
                net.rnn.weight_hh_l1[4, 1] = float("nan")
            opt = torch.optim.Adam(net.parameters())
            x = torch.rand(2, 4, 2)
        """,
        cell="loss = net(x).mean()\nloss.backward()\nopt.step()",
        truth=Expect(kind="nan", phase="parameter", op=None, tensor="rnn.weight_hh_l1", rows=(4,)),
    ),
    Case(
        name="odd_multihead_attention_in_projection",
        setup="""
            mha = nn.MultiheadAttention(4, 2, batch_first=True)
            with torch.no_grad():
                mha.in_proj_weight[9, 0] = math.nan
            opt = torch.optim.Adam(mha.parameters())
            x = torch.rand(2, 3, 4)
        """,
        cell="out, _ = mha(x, x, x, need_weights=False)\nout.mean().backward()\nopt.step()",
        truth=Expect(kind="nan", phase="parameter", op=None, tensor="in_proj_weight", rows=(9,)),
    ),
    Case(
        name="odd_inference_inf_by_arithmetic",
        setup="""
            class Inverse(nn.Module):
                def forward(self, x):
                    return 1 / x  # <- here
            net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Inverse()).eval()
            with torch.no_grad():
                net[0].weight.fill_(1.0); net[0].bias.fill_(0.5)
            xs = [torch.rand(2, 2), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])]
        """,
        cell="""
            with torch.inference_mode():
                outs = [net(x) for x in xs]
        """,
        truth=Expect(kind="inf", phase="forward", op="reciprocal", module="2", step=0, rows=(1,), diagnosis=slugs.DIV_ZERO, reproduced=ANY),
    ),
    Case(
        name="odd_old_style_weight_norm_of_zero",
        setup="""
            net = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(2, 2)))
            with torch.no_grad():
                net[1].weight_v[1] = 0.0
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(2, 2)
        """,
        cell="loss = net(x).square().mean()\nloss.backward()\nopt.step()",
        truth=Expect(
            kind="nan",
            phase="forward",
            op="_weight_norm_interface",
            module=frozenset({"", "1"}),
            rows=(1,),
            line=ANY,
            diagnosis="zero_norm",
        ),
    ),
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
    Case(
        name="odd_jacobian_regulariser",
        setup="""
            class Act(nn.Module):
                def forward(self, x):
                    return x.abs().pow(1.5)  # <- here
            net = nn.Sequential(nn.Linear(2, 2, bias=False), Act())
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(2, 2); x[1] = 0.0
            x.requires_grad_()
        """,
        cell="""
            y = net(x)
            (gx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = y.mean() + gx.square().mean()
            loss.backward()
            opt.step()
        """,
        # The second derivative of |x| ** 1.5 at 0 is infinite.
        truth=Expect(kind=frozenset({"inf", "nan"}), phase="backward", op="pow", module="1", backward=ANY, rows=(1,)),
    ),
    Case(
        name="odd_bare_transformer_encoder",
        setup="""
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            encoder = nn.TransformerEncoder(layer, 2)
            with torch.no_grad():
                encoder.layers[1].linear1.weight[3, 2] = float("inf")
            opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
            x = torch.rand(2, 3, 4)
        """,
        cell="""
            loss = encoder(x).square().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="parameter", op=None, tensor="layers.1.linear1.weight", rows=(3,)),
    ),
    Case(
        name="odd_bare_attention_with_an_empty_row",
        setup="""
            mha = nn.MultiheadAttention(4, 2, batch_first=True)
            opt = torch.optim.SGD(mha.parameters(), lr=0.1)
            x = torch.rand(2, 3, 4)
            pad = torch.tensor([[False, False, True], [True, True, True]])
        """,
        cell="""
            out, weights = mha(x, x, x, key_padding_mask=pad)  # <- here
            loss = out.square().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="_softmax", module="", rows=(2, 3), diagnosis=slugs.MASKED_ROW),
    ),
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
