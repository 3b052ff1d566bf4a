"""The value was bad before any op of the step saw it: data, a parameter, a buffer."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

_LOOP = """
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


CASES = (
    Case(
        name="data_one_bad_row",
        setup="""
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            batches = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(6)]
            batches[3][0][4, 2] = float("nan")
        """,
        cell="""
            for x, y in batches:
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, step=3, rows=(4,), diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="data_keyword_batch_dict",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 2)
                def forward(self, *, values, mask):
                    return {"logits": self.lin(values * mask)}
            model = Net()
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            batches = [{"values": torch.randn(5, 3), "mask": torch.ones(5, 3)} for _ in range(4)]
            batches[2]["values"][0, 0] = float("inf")
        """,
        cell="""
            for batch in batches:
                out = model(**batch)
                loss = out["logits"].pow(2).mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
        """,
        truth=Expect(
            kind="inf", phase="data", op=None, step=2, rows=(0,), tensor=frozenset({"values", "batch['values']"}), diagnosis=slugs.BAD_ROW
        ),
    ),
    Case(
        name="data_in_a_tuple_argument",
        setup="""
            class Pair(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)
                def forward(self, pair):
                    left, right = pair
                    return self.a(left) + self.b(right)
            model = Pair()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            pairs = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
            pairs[2][1][1] = float("-inf")
        """,
        cell="""
            for pair in pairs:
                opt.zero_grad()
                model(pair).square().mean().backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="data", op=None, step=2, rows=(1,)),
    ),
    Case(
        name="parameter_embedding_row",
        setup="""
            class Bag(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.emb = nn.Embedding(10, 4)
                    self.out = nn.Linear(4, 2)
                def forward(self, ids):
                    return self.out(self.emb(ids).mean(1))
            model = Bag()
            model.emb.weight.data[7] = float("nan")
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            ids, y = torch.tensor([[1, 2, 3], [4, 7, 5]]), torch.tensor([0, 1])
        """,
        cell="""
            for _ in range(2):
                loss = F.cross_entropy(model(ids), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="parameter", op=None, step=0, rows=(7,), tensor="emb.weight", diagnosis=slugs.BAD_EMBEDDING),
    ),
)
