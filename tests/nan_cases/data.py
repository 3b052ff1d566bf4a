"""The value was bad before any op of the step saw it: data, a parameter, a buffer."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

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
        name="data_under_batch_norm",
        setup="""
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
            opt = torch.optim.Adam(model.parameters(), lr=1e-3)
            x_all, y_all = torch.randn(40, 4), torch.randint(0, 2, (40,))
            x_all[27, 1] = float("nan")
        """,
        cell="""
            for start in range(0, 40, 8):
                x = x_all[start:start + 8]
                loss = F.cross_entropy(model(x), y_all[start:start + 8])
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, step=3, rows=(3,), diagnosis=slugs.BAD_ROW),
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
        name="data_every_value_of_a_batch",
        setup="""
            model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            images = [torch.rand(3, 1, 4, 4) for _ in range(4)]
            images[1].fill_(float("nan"))
            labels = torch.tensor([0, 1, 1])
        """,
        cell="""
            for image in images:
                loss = F.cross_entropy(model(image), labels)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, step=1, rows=(0, 1, 2)),
    ),
    Case(
        name="parameter_bias_is_infinite",
        setup="""
            model = nn.ModuleDict({"enc": nn.Linear(4, 4), "dec": nn.Linear(4, 1)})
            model["enc"].bias.data[2] = float("inf")
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.randn(5, 4)
        """,
        cell="""
            loss = model["dec"](torch.relu(model["enc"](x))).pow(2).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="parameter", op=None, step=0, rows=(2,), tensor=frozenset({"enc.bias", "bias"})),
    ),
    Case(
        name="parameter_written_in_the_loop",
        setup="""
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
            opt = torch.optim.Adam(model.parameters())
            batches = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(5)]
        """,
        cell="""
            for i, (x, y) in enumerate(batches):
                if i == 3:
                    with torch.no_grad():
                        model[0].weight[1] = float("nan")
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="parameter", op=None, step=3, rows=(1,), tensor="0.weight"),
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
    Case(
        name="parameter_embedding_row_looked_up_late",
        setup="""
            emb, head = nn.Embedding(20, 4), nn.Linear(4, 2)
            model = nn.Sequential(emb, head)
            emb.weight.data[13, 0] = float("inf")
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 13]), torch.tensor([6, 7])]
            y = torch.tensor([0, 1])
        """,
        cell="""
            for ids in batches:
                loss = F.cross_entropy(model(ids), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # Said at once, or when it is first used: both are true.
        truth=Expect(kind="inf", phase="parameter", op=None, step=ANY, rows=(13,), tensor="0.weight", diagnosis=slugs.BAD_EMBEDDING),
    ),
    Case(
        name="parameter_buffer_is_nan",
        setup="""
            class Scale(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.register_buffer("mean", torch.zeros(4))
                    self.lin = nn.Linear(4, 1)
                def forward(self, x):
                    return self.lin(x - self.mean)
            model = nn.Sequential(Scale())
            model[0].mean[1] = float("nan")
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            batches = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(3)]
        """,
        cell=_LOOP,
        truth=Expect(kind="nan", phase="parameter", op=None, step=0, rows=(1,), tensor="0.mean"),
    ),
    Case(
        name="parameter_running_var_is_nan_in_eval",
        setup="""
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
            model[1].running_var[2] = float("nan")
            x = torch.randn(5, 3)
        """,
        cell="""
            with torch.no_grad():
                out = model(x)
        """,
        truth=Expect(kind="nan", phase="parameter", op=None, step=0, rows=(2,), tensor="1.running_var"),
    ),
)
