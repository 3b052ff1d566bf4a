"""Healthy programs that look like one of the faults."""

from tests.unit.instruments.autograd.healthy import Program

__all__ = ["TRAPS"]

TRAPS = (
    Program(
        "a second head is computed and not trained; the loader makes tensors, and the loss is logged",
        """\
rows = [(torch.randn(3).tolist(), number % 2) for number in range(16)]
collate = lambda batch: (torch.tensor([row for row, _ in batch]), torch.tensor([label for _, label in batch]))
body, label, depth = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)
opt = torch.optim.SGD([p for part in (body, label, depth) for p in part.parameters()], lr=0.1)
total = 0
for x, y in torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate):
    h = body(x).relu()
    scores, distance = label(h), depth(h)
    loss = F.cross_entropy(scores, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item() + distance.mean().item()
""",
    ),
    Program(
        "master weights in float32 beside a bfloat16 model",
        """\
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(torch.bfloat16)
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
opt = torch.optim.AdamW(masters, lr=1e-2)
for x, y in [(torch.randn(5, 4).bfloat16(), torch.randint(2, (5,))) for _ in range(4)]:
    loss = F.cross_entropy(model(x).float(), y)
    for p in model.parameters():
        p.grad = None
    loss.backward()
    for m, p in zip(masters, model.parameters()):
        m.grad = p.grad.float()
    opt.step()
    with torch.no_grad():
        for m, p in zip(masters, model.parameters()):
            p.copy_(m)
""",
    ),
    Program(
        "Reptile: an inner optimizer on a copy, the outer step by hand",
        """\
import copy

net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
for task in range(3):
    fast = copy.deepcopy(net)
    inner = torch.optim.SGD(fast.parameters(), lr=0.05)
    for _ in range(3):
        x = torch.rand(6, 1)
        loss = F.mse_loss(fast(x), (x + task).sin())
        inner.zero_grad()
        loss.backward()
        inner.step()
    with torch.no_grad():
        for p, q in zip(net.parameters(), fast.parameters()):
            p.add_(q - p, alpha=0.1)
""",
    ),
    Program(
        "an auxiliary head that joins after a warm-up",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.main, self.aux = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x, warm):
        h = self.body(x).relu()
        return (self.main(h), None) if warm else (self.main(h), self.aux(h))

net = Net()
opt = torch.optim.AdamW(net.parameters())
for step in range(6):
    x, y = torch.randn(4, 4), torch.randint(2, (4,))
    main, aux = net(x, step < 3)
    loss = F.cross_entropy(main, y)
    if aux is not None:
        loss = loss + 0.3 * F.cross_entropy(aux, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "k-fold cross-validation: a new model and a new optimizer a fold",
        """\
X, y = torch.randn(24, 4), torch.randint(2, (24,))
for fold in range(3):
    held = torch.arange(24) % 3 == fold
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(X[~held]), y[~held]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        (model(X[held]).argmax(1) == y[held]).float().mean()
""",
    ),
)
