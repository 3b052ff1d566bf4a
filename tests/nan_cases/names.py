"""The same bug under every way to name, nest, share and return things."""

from tests.nan_cases.case import Case, Expect

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
)
