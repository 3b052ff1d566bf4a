"""Trainings of many kinds with nothing wrong: none of them may give a finding."""

from __future__ import annotations

from tests.unit.instruments.gradwatch.training_case import Training

__all__ = ["HEALTHY"]

_TRAIN = """
for x, y in batches({count}):
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    opt.step(){after}
"""


def _train(count: int = 60, after: str = "") -> str:
    return _TRAIN.format(count=count, after=f"\n    {after}" if after else "")


_SCHEDULES = (
    Training(
        "warm-up from a learning rate of 0 over all steps",
        """
net = mlp(16, 32, 4)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 2e7)
"""
        + _train(150, "schedule.step()"),
    ),
    Training(
        "warm-up, then a cosine down to 0",
        """
net = mlp(16, 32, 4)
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=120, final_div_factor=1e12)
"""
        + _train(119, "schedule.step()"),
    ),
    Training(
        "the last steps of a schedule that has ended",
        """
net = mlp(16, 32, 4)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(opt, 20, gamma=1e-3)
"""
        + _train(50, "schedule.step()"),
    ),
    Training(
        "a hinge loss that has reached 0",
        """
net = nn.Linear(16, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(32, 16)
y = torch.sign(x[:, :1])
for step in range(200):
    opt.zero_grad()
    F.relu(0.1 - y * net(x)).mean().backward()
    opt.step()
""",
    ),
)

_PARTS = (
    Training(
        "a frozen backbone, all parameters in the optimizer",
        """
net = nn.Sequential(mlp(16, 32, 32), nn.ReLU(), nn.Linear(32, 4))
net[0].requires_grad_(False)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
"""
        + _train(60),
    ),
    Training(
        "an embedding with sparse gradients, and an optimizer of its own",
        """
words, head = nn.Embedding(1000, 16, sparse=True), nn.Linear(16, 4)
sparse, opt = torch.optim.SparseAdam(words.parameters(), lr=1e-2), torch.optim.Adam(head.parameters(), lr=1e-2)
for step in range(60):
    x = torch.randint(0, 40, (16, 6))
    sparse.zero_grad()
    opt.zero_grad()
    F.cross_entropy(head(words(x).mean(1)), x[:, 0] % 4).backward()
    sparse.step()
    opt.step()
""",
    ),
    Training(
        "a head that is not used, with gradients set to zeros",
        """
net = nn.ModuleDict({"body": mlp(16, 32), "a": nn.Linear(32, 4), "b": nn.Linear(32, 4)})
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step, (x, y) in enumerate(batches(80)):
    opt.zero_grad(set_to_none=False)
    head = net["a"] if step < 30 else net["b"]
    F.cross_entropy(head(net["body"](x).relu()), y).backward()
    opt.step()
""",
    ),
    Training(
        "tied weights in a language model",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(50, 32), nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.layer(self.words(x)))

net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(50):
    x = torch.randint(0, 50, (8, 12)).sort(1).values
    opt.zero_grad()
    F.cross_entropy(net(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    opt.step()
""",
    ),
    Training(
        "progressive unfreezing",
        """
net = mlp(16, 32, 32, 4)
net[0].requires_grad_(False)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
"""
        + _train(40)
        + "net[0].requires_grad_(True)\n"
        + _train(40),
    ),
)

_LOOPS = (
    Training(
        "a GAN",
        """
G, D = mlp(4, 32, 2), mlp(2, 32, 1)
opt_g, opt_d = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999)), torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
one, zero = torch.ones(32, 1), torch.zeros(32, 1)
for step in range(250):
    real, fake = torch.randn(32, 2), G(torch.randn(32, 4))
    opt_d.zero_grad()
    loss = F.binary_cross_entropy_with_logits(D(real), one) + F.binary_cross_entropy_with_logits(D(fake.detach()), zero)
    (loss / 2).backward()
    opt_d.step()
    opt_g.zero_grad()
    F.binary_cross_entropy_with_logits(D(fake), one).backward()
    opt_g.step()
""",
    ),
    Training(
        "gradient accumulation with clipping",
        """
net = mlp(16, 32, 4)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
for number, (x, y) in enumerate(batches(160)):
    (F.cross_entropy(net(x), y) / 4).backward()
    if number % 4 == 3:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
""",
    ),
    Training(
        "clipping that cuts most steps by a little",
        """
net = mlp(16, 32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.2)
for x, y in batches(60):
    opt.zero_grad()
    F.cross_entropy(3 * net(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    opt.step()
""",
    ),
    Training(
        "a GradScaler that skips its first steps",
        """
net = mlp(16, 32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=5)
for x, y in batches(80):
    opt.zero_grad()
    scaler.scale(F.cross_entropy(net(x), y)).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
""",
    ),
    Training(
        "LBFGS with a closure",
        """
net = mlp(4, 8, 1)
opt = torch.optim.LBFGS(net.parameters(), max_iter=5)
x = torch.randn(64, 4)
y = x.sin().sum(1, keepdim=True)

def closure():
    opt.zero_grad()
    loss = F.mse_loss(net(x), y)
    loss.backward()
    return loss

for step in range(30):
    opt.step(closure)
""",
    ),
    Training(
        "a convolutional net with BatchNorm",
        """
net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
).to(memory_format=torch.channels_last)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(60):
    y = torch.randint(0, 4, (16,))
    x = torch.randn(16, 1, 8, 8) * 0.1 + y.view(-1, 1, 1, 1)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
    ),
    Training(
        "cross-validation: a new model and optimizer for each fold",
        """
for fold in range(4):
    net = mlp(16, 32, 4)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for x, y in batches(30, seed=fold):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
""",
    ),
    Training(
        "an image that is optimized, and no model",
        """
image = torch.zeros(8, 8, requires_grad=True)
goal = torch.rand(8, 8)
opt = torch.optim.Adam([image], lr=0.05)
for step in range(100):
    opt.zero_grad()
    (image - goal).square().sum().backward()
    opt.step()
""",
    ),
    Training(
        "float64 and complex parameters",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectrum, self.head = nn.Parameter(0.1 * torch.randn(9, dtype=torch.complex128)), nn.Linear(16, 4, dtype=torch.float64)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x.double()) * self.spectrum, n=16))

net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
"""
        + _train(50),
    ),
    Training(
        "an optimizer for each of several models, one without a state in each step, and a strong decay that still learns",
        """
for fold in range(6):
    net = mlp(16, 32, 4)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for x, y in batches(1):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
for x, y in batches(30):
    plain = torch.optim.SGD(net.parameters(), lr=0.05)
    plain.zero_grad()
    F.cross_entropy(net(x), y).backward()
    plain.step()
""",
    ),
    Training(
        "a likelihood of real numbers below 0, and a density that narrows",
        """
mean, log_scale = nn.Linear(16, 1), nn.Parameter(torch.zeros(()))
opt = torch.optim.Adam([*mean.parameters(), log_scale], lr=1e-2)
truth = torch.randn(16, 1)
for step in range(300):
    x = torch.randn(64, 16)
    y = x @ truth + 1e-3 * torch.randn(64, 1)
    opt.zero_grad()
    (-torch.distributions.Normal(mean(x), log_scale.exp()).log_prob(y).mean()).backward()
    opt.step()
""",
    ),
    Training(
        "a loss that does not fall, as what it is to predict is noise",
        """
net = mlp(16, 32, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(100):
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    opt.step()
""",
        doubt="the loss does not fall, from 1 to 1: `%overfit net (x, y) F.mse_loss opt` tells whether the model can learn",
    ),
    Training(
        "an image that is to make a class as large as it can be, and a model that begins anew for each sample",
        """
net = mlp(16, 32, 4)
image = torch.zeros(1, 16, requires_grad=True)
opt = torch.optim.Adam([image], lr=0.3)
for step in range(60):
    opt.zero_grad()
    (-net(image)[0, 1]).backward()
    opt.step()
start = {key: value.clone() for key, value in net.state_dict().items()}
for x, y in batches(8):
    net.load_state_dict(start)
    adapted = torch.optim.Adam(net.parameters(), lr=1e-3)
    adapted.zero_grad()
    F.cross_entropy(net(x), y).backward()
    adapted.step()
""",
    ),
    Training(
        "steps without any gradient between the others",
        """
net = mlp(16, 32, 4)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for number, (x, y) in enumerate(batches(60)):
    opt.zero_grad()
    if number % 3:
        F.cross_entropy(net(x), y).backward()
    opt.step()
""",
    ),
)

HEALTHY = (*_SCHEDULES, *_PARTS, *_LOOPS)
