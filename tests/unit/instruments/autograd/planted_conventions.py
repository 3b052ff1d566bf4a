"""Planted faults of formulas: what is computed raises nothing, and is not what such a formula means."""

from tests.unit.instruments.autograd.case import Case

__all__ = ["CASES"]

_VAE = """\
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 6), nn.Linear(3, 12)

    def forward(self, x):
        mean, logvar = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)), mean, logvar

model = VAE()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for x in torch.randn(4, 8, 12):
    output, mean, logvar = model(x)
    {}
    kl = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())  #> saved
    loss = reconstruction + kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_ATTENTION = """\
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        weights = self.query(x) @ self.key(x).transpose(-2, -1) / 6**0.5
        weights = weights.masked_fill(torch.tril(torch.ones(5, 5)) == 0, float("-inf"))
        weights = F.softmax(weights, {})  #> location
        return self.out(F.dropout(weights, 0.1, self.training) @ self.value(x))  #> saved

model = Head()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(4, 2, 5, 6):
    loss = F.mse_loss(model(x)[:, :-1], x[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_DROPS = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x):
        x = self.first(x).relu()
        x = {}  #> location
        return self.second(x)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(4, 8, 6):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    likely = model(torch.randn(8, 6)).softmax(1)
"""
_CRITIC = """\
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x):
        h = self.body(x).relu()
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)

policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
for states in torch.randn(4, 10, 4):
    distribution, values = policy(states)
    actions, returns = distribution.sample(), torch.randn(10)
    advantages = returns - values  #> saved
    actor = -(distribution.log_prob(actions) * {}).mean()  #> location
    critic = {}
    loss = actor + 0.5 * critic
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

_COUNTS = """\
data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
criterion = nn.CrossEntropyLoss()

def train_one_epoch(batches):
    {}
    for step, (x, y) in enumerate(batches):
        {}
        out = model(x)
        loss = criterion(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {}
    {}

for epoch in range(2):
    train_one_epoch(loader)
"""

CASES = (
    Case(
        name="a VAE whose reconstruction is a mean beside a sum",
        kind="unlike_reductions",
        text=_VAE.format("reconstruction = F.mse_loss(output, x)  #> location"),
        edits=(("F.mse_loss(output, x)", 'F.mse_loss(output, x, reduction="sum")'),),
    ),
    Case(
        name="a VAE whose squared error is averaged by hand",
        kind="unlike_reductions",
        text=_VAE.format("reconstruction = ((output - x) ** 2).mean()  #> location"),
        edits=(("((output - x) ** 2).mean()", "((output - x) ** 2).sum()"),),
    ),
    Case(
        name="attention whose softmax runs over the queries",
        kind="other_axis",
        text=_ATTENTION.format("dim=-2"),
        edits=(("dim=-2", "dim=-1"),),
    ),
    Case(
        name="attention whose softmax is given the queries' dimension by position",
        kind="other_axis",
        text=_ATTENTION.format("1"),
        edits=(("F.softmax(weights, 1)", "F.softmax(weights, dim=-1)"),),
    ),
    Case(
        name="a function of dropout that is not told of the mode",
        kind="eval_in_train_mode",
        text=_DROPS.format("F.dropout(x, p=0.5)"),
        edits=(("F.dropout(x, p=0.5)", "F.dropout(x, p=0.5, training=self.training)"),),
    ),
    Case(
        name="a module of dropout that is made in the forward",
        kind="eval_in_train_mode",
        text=_DROPS.format("nn.Dropout(0.3)(x)"),
        edits=(("nn.Dropout(0.3)(x)", "nn.functional.dropout(x, 0.3, training=self.training)"),),
    ),
    Case(
        name="an advantage that sends the policy's gradient into the critic",
        kind="driven_value",
        text=_CRITIC.format("advantages", "F.smooth_l1_loss(values, returns)"),
        tensors=("advantages",),
        edits=(("log_prob(actions) * advantages", "log_prob(actions) * advantages.detach()"),),
    ),
    Case(
        name="an advantage whose square the critic minimizes",
        kind="driven_value",
        text=_CRITIC.format("advantages", "advantages.pow(2).mean()"),
        edits=(("log_prob(actions) * advantages", "log_prob(actions) * advantages.detach()"),),
    ),
    Case(
        name="an activation in place at the beginning of a residual branch",
        kind="overwritten_input",
        text="""\
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        return self.branch(x) + x  #> location

model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for x in torch.randn(4, 6, 4):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("nn.ReLU(inplace=True)", "nn.ReLU()"),),
    ),
    Case(
        name="a data set without indices, which each worker reads as a whole",
        kind="repeated_samples",
        text="""\
class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(24.0).view(6, 4))

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
for x in torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2):  #> location
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        tensors=("Numbers",),
        edits=(("num_workers=2", "num_workers=0"),),
    ),
    Case(
        name="right answers divided by the number of batches",
        kind="miscounted",
        text=_COUNTS.format(
            "correct = 0",
            "pass",
            "correct += (out.argmax(1) == y).sum().item()",
            "print(100.0 * correct / len(batches))  #> location",
        ),
        edits=(("correct / len(batches)", "correct / len(batches.dataset)"),),
    ),
    Case(
        name="means of batches divided by the number of samples",
        kind="miscounted",
        text=_COUNTS.format("total = 0.0", "pass", "total += loss.item()", "print(total / len(batches.dataset))  #> location"),
        edits=(("total / len(batches.dataset)", "total / len(batches)"),),
    ),
    Case(
        name="a sum of losses by their sizes, divided by the batches so far",
        kind="miscounted",
        text=_COUNTS.format("total = 0.0", "pass", "total += loss.item() * x.size(0)", "print(total / len(batches))  #> location"),
        edits=(("total / len(batches)", "total / len(batches.dataset)"),),
    ),
    Case(
        name="weights that the constructor computes, and that are no parameters",
        kind="second_backward",
        text="""\
class Layer(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.weight = torch.randn(before, after, requires_grad=True) * 0.1
        self.bias = nn.Parameter(torch.zeros(after))

    def forward(self, x):
        return x @ self.weight + self.bias

model = nn.Sequential(Layer(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(4, 5, 6):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()  #> location
    optimizer.step()
""",
        tensors=("weight",),
        edits=(
            (
                "torch.randn(before, after, requires_grad=True) * 0.1",
                "nn.Parameter(torch.randn(before, after, requires_grad=True) * 0.1)",
            ),
        ),
    ),
    Case(
        name="the last batch's right answers, of all samples",
        kind="miscounted",
        text="""\
x, y = torch.randn(50, 6), torch.randint(3, (50,))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for start in range(0, 50, 10):
        inputs, labels = x[start : start + 10], y[start : start + 10]
        output = model(inputs)
        loss = F.cross_entropy(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    correct = (output.argmax(1) == labels).float().sum()
    accuracy = correct / x.shape[0]  #> location
""",
        edits=(("x.shape[0]", "len(labels)"),),
    ),
    Case(
        name="masks as pictures store them",
        kind="loss_input",
        text="""\
model = nn.Conv2d(1, 1, 3, padding=1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
criterion = nn.BCEWithLogitsLoss()
for x in torch.randn(4, 2, 1, 6, 6):
    masks = 255.0 * (x > 0)
    loss = criterion(model(x).squeeze(1), masks.squeeze(1))  #> location
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("masks.squeeze(1)", "masks.squeeze(1) / 255"),),
    ),
    Case(
        name="a layer that is frozen with a gradient, and moves by momentum",
        kind="frozen_in_vain",
        text="""\
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step, x in enumerate(torch.randn(6, 8, 4)):
    if step == 3:
        for parameter in model[0].parameters():
            parameter.requires_grad = False  #> location
    loss = model(x).square().mean()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
""",
        edits=(
            (
                "            parameter.requires_grad = False  #> location",
                "            parameter.requires_grad = False\n            parameter.grad = None",
            ),
        ),
    ),
    Case(
        name="second derivatives by two columns at once",
        kind="mixed_derivatives",
        text="""\
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
xy = torch.rand(16, 2, requires_grad=True)
first = torch.autograd.grad(model(xy).sum(), xy, create_graph=True)[0]
second = torch.autograd.grad(first, xy, torch.ones_like(first), create_graph=True)[0]  #> location
loss = (second[:, 0] + second[:, 1]).square().mean()
loss.backward()
""",
        edits=(
            (
                "torch.autograd.grad(first, xy, torch.ones_like(first), create_graph=True)[0]",
                "torch.stack([torch.autograd.grad(first[:, i].sum(), xy, create_graph=True)[0][:, i] for i in range(xy.shape[1])], 1)",
            ),
        ),
    ),
    Case(
        name="a norm of a single feature",
        kind="no_gradient",
        text="""\
model = nn.Sequential(nn.Linear(3, 1), nn.LayerNorm(1), nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(4, 8, 3):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()  #> location
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    Case(
        name="a softmax that the model's last line calls, before cross_entropy",
        kind="double_softmax",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return F.softmax(self.layer(x), dim=1)  #> location

model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(4, 8, 4):
    loss = F.cross_entropy(model(x), torch.arange(8) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("F.softmax(self.layer(x), dim=1)", "self.layer(x)"),),
    ),
    Case(
        name="a recurrent layer with batch_first that is given the steps first",
        kind="leaking_batch",
        text="""\
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)  #> location

    def forward(self, x):
        states, _ = self.rnn(x.permute(1, 0, 2))
        return self.head(states[-1])

model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(4, 6, 9, 3):
    loss = F.cross_entropy(model(x), torch.arange(6) % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("nn.GRU(3, 8, batch_first=True)", "nn.GRU(3, 8)"),),
    ),
    Case(
        name="a normal sample by its mean",
        kind="no_gradient",
        text="""\
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(4, 8, 4):
    mean, deviation = model(x).chunk(2, 1)
    drawn = torch.normal(mean, deviation.exp())  #> location
    loss = (drawn - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("torch.normal(mean, deviation.exp())", "mean + deviation.exp() * torch.randn_like(deviation.exp())"),),
    ),
    Case(
        name="second derivatives of a network of straight pieces",
        kind="no_gradient",
        text="""\
model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
x = torch.linspace(-1, 1, 9)[:, None].requires_grad_()
slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
curvature = torch.autograd.grad(slope.sum(), x)[0]  #> location
""",
        edits=(("nn.ReLU(inplace=True)", "nn.Tanh()"),),
    ),
    Case(
        name="items that are cropped in the data themselves",
        kind="shared_memory",
        text="""\
class Boxes(torch.utils.data.Dataset):
    def __init__(self):
        self.boxes = [torch.rand(4) + 2 for _ in range(12)]

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, index):
        box = self.boxes[index]  #> location
        box -= 0.5
        return box, box.sum()

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(Boxes(), batch_size=4, shuffle=True):
        loss = F.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
        edits=(("self.boxes[index]", "self.boxes[index].clone()"),),
    ),
)
