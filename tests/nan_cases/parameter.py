"""A parameter or a buffer was bad before the step."""

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
