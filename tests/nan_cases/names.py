"""The same bug under every way to name, nest, share and return things."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

_STEP = """
    loss = model(x).mean()
    loss.backward()
    opt.step()
"""


CASES = (
    Case(
        name="names_third_call_of_a_shared_block",
        setup="""
            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2, bias=False)
                def forward(self, x):
                    return self.lin(x).mul(1e13).square()  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.block = Block()
                def forward(self, x):
                    for _ in range(3):
                        x = self.block(x) * 1e-26
                    return x
            model = Net()
            with torch.no_grad():
                model.block.lin.weight.copy_(torch.eye(2))
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            x = torch.tensor([[1.0, 1.0], [2.0, 200.0]])
        """,
        cell=_STEP,
        # 200, 4e4, 1.6e9; the square of 1.6e9 * 1e13 is past float32. The 1.0 of the first row stays 1.0.
        truth=Expect(kind="inf", phase="forward", op="pow", module="block", call=3, rows=(1,)),
    ),
    Case(
        name="names_dataclass_output_without_gradient",
        setup="""
            from dataclasses import dataclass
            @dataclass
            class Output:
                logits: torch.Tensor
                hidden: tuple
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2)
                def forward(self, x):
                    h = self.lin(x)
                    ratio = h / (x - x)  # <- here
                    return Output(logits=ratio, hidden=(h,))
            model = Net()
            x = torch.randn(3, 2)
        """,
        cell="""
            with torch.inference_mode():
                out = model(x)
        """,
        truth=Expect(kind="inf", phase="forward", op="div", module="", step=0, rows=(0, 1, 2), reproduced=ANY, diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="names_keyword_only_forward",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2)
                def forward(self, *, left, right, options=None):
                    h = self.lin(left) - self.lin(right)
                    return torch.log(h)  # <- here
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 2)
        """,
        cell="""
            loss = model(left=x, right=x.clone(), options={"a": [1, 2]}).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="log", module="", rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="names_model_from_an_imported_file",
        files={
            "tiny_model_file.py": """
                import torch
                from torch import nn


                class Scorer(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.lin = nn.Linear(2, 1)

                    def forward(self, x):
                        z = self.lin(x)
                        p = torch.sigmoid(z)
                        return torch.log(1 - p)  # <- here
            """,
        },
        setup="""
            import tiny_model_file
            model = nn.Sequential(nn.Identity(), tiny_model_file.Scorer())
            with torch.no_grad():
                model[1].lin.weight.fill_(1.0); model[1].lin.bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-4)
            data = [torch.randn(3, 2), torch.tensor([[0.1, 0.2], [20.0, 20.0], [0.3, 0.1]])]
        """,
        cell="""
            for x in data:
                loss = model(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="log", module="1", step=1, rows=(1,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="names_module_made_inside_forward",
        setup="""
            class Late(nn.Module):
                def forward(self, x):
                    return x.asin()  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2)
                def forward(self, x):
                    return Late()(self.lin(x) + 10)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.rand(3, 2)
        """,
        cell=_STEP,
        # It has no path of its own: the class name, or the module that made it.
        truth=Expect(kind="nan", phase="forward", op="asin", module=frozenset({"Late", ""}), call=ANY, rows=(0, 1, 2)),
    ),
    Case(
        name="names_lambda_layer",
        setup="""
            class Fn(nn.Module):
                def __init__(self, fn):
                    super().__init__()
                    self.fn = fn
                def forward(self, x):
                    return self.fn(x)
            model = nn.Sequential(
                nn.Linear(2, 2),
                Fn(lambda t: t.relu()),
                Fn(lambda t: t / t.sum(1, keepdim=True)),  # <- here
                nn.Linear(2, 1),
            )
            with torch.no_grad():
                model[0].weight.fill_(1.0); model[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.tensor([[1.0, 2.0], [3.0, 1.0], [-1.0, -2.0]])
        """,
        cell=_STEP,
        truth=Expect(kind="nan", phase="forward", op="div", module="2", rows=(2,), diagnosis=slugs.DIV_ZERO),
    ),
)
