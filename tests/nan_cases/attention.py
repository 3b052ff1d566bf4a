"""Softmax over nothing, and masks that say more than was meant."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

_LOOP = """
    for x, mask in batches:
        loss = model(x, mask).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

CASES = (
    Case(
        name="attention_row_masked_by_a_boolean",
        setup="""
            class Attention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
                def forward(self, x, keep):
                    scores = self.q(x) @ self.k(x).mT
                    scores = scores.masked_fill(~keep[:, None, :], float("-inf"))
                    weight = F.softmax(scores, dim=-1)  # <- here
                    return weight @ self.v(x)
            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.attn = Attention()
                def forward(self, x, keep):
                    return x + self.attn(x, keep)
            model = Block()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [(torch.randn(3, 4, 4), torch.ones(3, 4, dtype=torch.bool)) for _ in range(3)]
            batches[1][1][2] = False
        """,
        cell=_LOOP,
        truth=Expect(kind="nan", phase="forward", op="_softmax", module="attn", step=1, rows=(2,), diagnosis=slugs.MASKED_ROW),
    ),
)
