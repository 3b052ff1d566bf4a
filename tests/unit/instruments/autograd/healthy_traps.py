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
        "PCGrad: gradients of tasks are taken apart, projected, and set",
        """\
trunk, a, b = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
params = [*trunk.parameters(), *a.parameters(), *b.parameters()]
opt = torch.optim.SGD(params, lr=0.1)
for x in torch.randn(4, 6, 4):
    h = trunk(x).tanh()
    grads = []
    for loss in (a(h).square().mean(), (b(h) - 1).square().mean()):
        opt.zero_grad()
        loss.backward(retain_graph=True)
        grads.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params])
    opt.zero_grad()
    dot = sum((g * k).sum() for g, k in zip(*grads))
    for p, g, k in zip(params, *grads):
        p.grad = g + k if dot >= 0 else g + k - dot * g / (g.square().sum() + 1e-8)
    opt.step()
""",
    ),
    Program(
        "the discriminator's gradients of the generator's loss are thrown away",
        """\
G, D = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
og, od = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for real in torch.randn(4, 6, 4):
    fake = G(torch.randn(6, 2))
    og.zero_grad()
    F.softplus(-D(fake)).mean().backward()
    od.zero_grad()
    og.step()
    (F.softplus(D(fake.detach())).mean() + F.softplus(-D(real)).mean()).backward()
    od.step()
    od.zero_grad()
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
        "a graph network mixes the nodes of its one graph",
        """\
class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, adj):
        return self.b(adj @ F.dropout(F.relu(self.a(adj @ x)), 0.5, self.training))

x, y = torch.randn(9, 5), torch.randint(3, (9,))
adj = (torch.rand(9, 9) < 0.4).float() + torch.eye(9)
adj = adj / adj.sum(1, keepdim=True)
train = torch.rand(9) < 0.6
model = GCN()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    opt.zero_grad()
    loss = F.cross_entropy(model(x, adj)[train], y[train])
    loss.backward()
    opt.step()
    model.eval()
    with torch.no_grad():
        (model(x, adj).argmax(1) == y)[~train].float().mean()
""",
    ),
    Program(
        "time comes first, and attention is a softmax over it",
        """\
class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.score, self.out = nn.GRU(3, 6), nn.Linear(6, 1), nn.Linear(6, 2)

    def forward(self, x):
        h, _ = self.rnn(x)
        w = torch.softmax(self.score(h), dim=0)
        return self.out((w * h).sum(0))

model = Pool()
opt = torch.optim.Adam(model.parameters())
for x, y in [(torch.randn(7, 4, 3), torch.randint(2, (4,))) for _ in range(3)]:
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "CLIP features are normalised in place under no_grad",
        """\
image, text = nn.Linear(6, 4), nn.Linear(5, 4)
with torch.no_grad():
    i, t = image(torch.randn(3, 6)), text(torch.randn(7, 5))
    i /= i.norm(dim=-1, keepdim=True)
    t /= t.norm(dim=-1, keepdim=True)
    print((100 * i @ t.t()).softmax(-1).argmax(-1))
""",
    ),
    Program(
        "the best weights are loaded back, and training goes on",
        """\
import copy

model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
opt = torch.optim.Adam(model.parameters())
best, state = float("inf"), None
xv, yv = torch.randn(8, 4), torch.randint(2, (8,))
for epoch in range(4):
    model.train()
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
    model.eval()
    with torch.no_grad():
        val = F.cross_entropy(model(xv), yv).item()
    if val < best:
        best, state = val, copy.deepcopy(model.state_dict())
    else:
        model.load_state_dict(state)
""",
    ),
    Program(
        "magnitude pruning while training",
        """\
from torch.nn.utils import prune

model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
prune.l1_unstructured(model[0], "weight", 0.4)
for x, y in [(torch.randn(5, 6), torch.randint(2, (5,))) for _ in range(4)]:
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
prune.remove(model[0], "weight")
""",
    ),
    Program(
        "evolution strategies: no backward at all",
        """\
from torch.nn.utils import parameters_to_vector, vector_to_parameters

model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
theta = parameters_to_vector(model.parameters()).detach()
x = torch.randn(16, 3)
for generation in range(3):
    noise = torch.randn(6, len(theta))
    scores = []
    with torch.no_grad():
        for n in noise:
            vector_to_parameters(theta + 0.1 * n, model.parameters())
            scores.append(-F.mse_loss(model(x), x.sum(1, keepdim=True)))
    scores = torch.stack(scores)
    theta = theta + 0.05 * ((scores - scores.mean()) / (scores.std() + 1e-8)) @ noise / 6
""",
    ),
    Program(
        "functional parameters with an update by hand",
        """\
from torch.func import functional_call, grad_and_value

model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
params = {k: v.detach().clone() for k, v in model.named_parameters()}

def loss_fn(p, x):
    return functional_call(model, p, (x,)).square().mean()

for x in torch.randn(4, 5, 3):
    grads, loss = grad_and_value(loss_fn)(params, x)
    params = {k: p - 0.1 * grads[k] for k, p in params.items()}
""",
    ),
    Program(
        "prompt tuning of a model in eval mode",
        """\
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=12, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
model.eval()
for p in model.parameters():
    p.requires_grad_(False)
prompt = nn.Parameter(torch.randn(3, 8) * 0.1)
opt = torch.optim.Adam([prompt], lr=0.1)
for ids in torch.randint(13, (3, 2, 5)):
    embeds = torch.cat([prompt.expand(2, 3, 8), model.transformer.wte(ids)], 1)
    labels = torch.cat([torch.full((2, 3), -100), ids], 1)
    loss = model(inputs_embeds=embeds, labels=labels).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a step is skipped where the loss is not finite",
        """\
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i, x in enumerate(torch.randn(5, 4, 3)):
    loss = model(x).square().mean() if i != 2 else model(x / 0).mean()
    opt.zero_grad()
    if not torch.isfinite(loss):
        continue
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
    Program(
        "a mean teacher in training mode under no_grad",
        """\
import copy

student = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.detach_()
opt = torch.optim.SGD(student.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]:
    with torch.no_grad():
        target = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
    out = student(x)
    loss = F.cross_entropy(out[:4], y[:4]) + F.mse_loss(out.softmax(1), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    for pt, ps in zip(teacher.parameters(), student.parameters()):
        pt.data.mul_(0.99).add_(ps.data, alpha=0.01)
""",
    ),
    Program(
        "a fused AdamW and a graph that is gone before the step",
        """\
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.AdamW(model.parameters(), fused=True)
buffer = torch.empty(6, 4).numpy()
for step in range(4):
    buffer[:] = torch.randn(6, 4).numpy()
    x = torch.from_numpy(buffer)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "two forwards of a DDP discriminator in one process",
        """\
import tempfile
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        disc = DDP(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1)))
        opt = torch.optim.Adam(disc.parameters())
        for real in torch.randn(3, 3, 1, 6, 6):
            loss = F.relu(1 + disc(torch.randn(3, 1, 6, 6))).mean() + F.relu(1 - disc(real)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    finally:
        disc = None
        dist.destroy_process_group()
""",
    ),
    Program(
        "a soft assignment to clusters, which is summed over the samples, and DiffPool",
        """\
class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.assign, self.embed, self.head = nn.Linear(6, 3), nn.Linear(6, 6), nn.Linear(18, 2)

    def forward(self, x, adjacency):
        s = torch.softmax(self.assign(x), dim=-1)
        pooled = s.transpose(1, 2) @ self.embed(x)
        linked = s.transpose(1, 2) @ adjacency @ s
        weighted = torch.bmm(F.softmax(self.assign(x).transpose(1, 2), dim=1), self.embed(x))
        return self.head((pooled + weighted).flatten(1)), linked

model = Pool()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for x in torch.randn(4, 5, 7, 6):
    scores, linked = model(x, torch.rand(5, 7, 7))
    loss = F.cross_entropy(scores, torch.randint(2, (5,))) + 1e-3 * linked.square().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "cross attention both ways, slots that are normed once more, and dropout that asks for the mode",
        """\
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, a, b):
        scores = self.q(a) @ self.k(b).transpose(1, 2)
        one = F.dropout(scores.softmax(-1), 0.1, self.training) @ self.v(b)
        other = scores.softmax(1).transpose(1, 2) @ self.v(a)
        slots = scores.softmax(1)
        slots = (slots / slots.sum(-1, keepdim=True)) @ self.v(b)
        return self.head(F.dropout(one + slots, training=self.training)).mean(1) + self.head(other).mean(1)

model = Both()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for a in torch.randn(4, 3, 5, 6):
    loss = model(a, torch.randn(3, 4, 6)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
model.eval()
with torch.no_grad():
    means = model(torch.randn(3, 5, 6), torch.randn(3, 4, 6))
""",
    ),
    Program(
        "a VAE with both terms summed, one with a small factor, and a penalty on the weights",
        """\
encoder, decoder = nn.Linear(12, 6), nn.Linear(3, 12)
opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)
for step, x in enumerate(torch.randn(6, 8, 12)):
    mean, logvar = encoder(x).chunk(2, 1)
    output = decoder(mean + torch.exp(0.5 * logvar) * torch.randn_like(mean))
    kl = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
    if step % 3 == 0:
        loss = F.mse_loss(output, x, reduction="sum") + kl
    elif step % 3 == 1:
        loss = F.mse_loss(output, x) + kl / x.numel() + 0.5 * encoder.weight.square().sum()
    else:
        loss = F.mse_loss(output, x) + 0.001 * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "actor and critic with an advantage that is a constant, and a soft one without any product",
        """\
body, actor, critic = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)
opt = torch.optim.Adam([*body.parameters(), *actor.parameters(), *critic.parameters()], 1e-3)
for states in torch.randn(4, 10, 4):
    h = body(states).relu()
    distribution, values = torch.distributions.Categorical(logits=actor(h)), critic(h).squeeze(-1)
    actions, returns = distribution.sample(), torch.randn(10)
    advantages = (returns - values).detach()
    loss = -(distribution.log_prob(actions) * advantages).mean() + F.mse_loss(values, returns) - 0.01 * distribution.entropy().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a residual net that activates in place what nobody reads again",
        """\
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.relu = nn.BatchNorm1d(8), nn.ReLU(inplace=True)
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, x):
        out = self.relu(self.norm(x))
        return self.branch(out) + x

model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 1)))
opt = torch.optim.SGD(model.parameters(), 0.01)
for x in torch.randn(4, 6, 4):
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a data set without indices that its workers divide",
        """\
class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(torch.randn(12, 4, generator=torch.Generator().manual_seed(0))[worker.id :: worker.num_workers])

model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), 1e-2)
for x in torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2):
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "means by batches, shares by samples, a running mean, and sums that begin anew where they are read",
        """\
data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, criterion = nn.Linear(6, 3), nn.CrossEntropyLoss()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
total = summed = right = shares = count = 0
for number, (x, y) in enumerate(loader):
    opt.zero_grad()
    parts = 0
    for half in x.split(4):
        parts = parts + model(half).square().mean()
    out = model(x)
    loss = criterion(out, y) + 0 * parts
    loss.backward()
    opt.step()
    best = out.max(dim=0).values.mean() * 0 + out.argmax(1)
    right += (out.argmax(1) == y).sum().item()
    shares += (out.argmax(1) == y).float().mean().item()
    total += loss.item()
    summed += loss.item() * len(x)
    count += y.size(0)
    print(total / (number + 1), right / count)
print(total / len(loader), summed / len(loader.dataset), right / len(data), shares / len(loader), summed / count)
""",
    ),
    Program(
        "scores that are read by rows and by columns, as other views of one memory, and the shares of two sets by one name",
        """\
model, text = nn.Linear(6, 5), nn.Linear(6, 5)
opt = torch.optim.SGD([*model.parameters(), *text.parameters()], lr=0.1)
x, y, other = torch.randn(8, 4, 6), torch.randint(5, (8, 4)), torch.randint(5, (40, 4))

def accuracy(logits, y):
    correct = (logits.argmax(-1) == y).sum().item()
    return correct / y.numel()

for step in range(4):
    logits = model(x)
    pairs = model(x[:, 0]) @ text(x[:, 1]).t()
    classes = torch.arange(8)
    loss = F.cross_entropy(logits.view(-1, 5), y.view(-1)) + F.cross_entropy(pairs, classes) + F.cross_entropy(pairs.t(), classes)
    opt.zero_grad()
    loss.backward()
    opt.step()
    share = accuracy(logits, y)
    by_text = (pairs.argmax(0) == classes).float().mean()
correct = (model(x).argmax(-1)[:, 0] == y[:, 0]).sum().item()
trained = correct / len(y)
correct = (model(x[:4]).argmax(-1)[:, 0] == y[:4, 0]).sum().item()
tested = correct / len(y[:4])
""",
    ),
    Program(
        "distillation by the mean of a batch, an L1 term that is divided, and quotients of quotients",
        """\
data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
student, teacher = nn.Linear(6, 3), nn.Linear(6, 3)
opt = torch.optim.SGD(student.parameters(), lr=0.1)
correct = total = seen = 0
for x, y in loader:
    out = student(x)
    with torch.no_grad():
        likely = (teacher(x) / 4).softmax(1)
    soft = F.kl_div((out / 4).log_softmax(1), likely, reduction="batchmean")
    boxes = 5 * (out[:, :2] - x[:, :2]).abs().sum() / len(x)
    batch_loss = F.cross_entropy(out, y).item() * x.size(0)
    loss = F.cross_entropy(out, y) + 16 * soft + boxes
    opt.zero_grad()
    loss.backward()
    opt.step()
    correct += (out.argmax(1) == y).sum().item()
    total += batch_loss
    seen += len(x)
print(correct / len(loader) / 8, total / len(loader.dataset), seen / len(loader))
""",
    ),
    Program(
        "a policy of coins, labels with noise, coins that are drawn straight through, and an attack by the gradient of the input",
        """\
policy, critic, straight = nn.Linear(4, 2), nn.Linear(4, 1), nn.Linear(4, 2)
opt = torch.optim.SGD([*policy.parameters(), *critic.parameters(), *straight.parameters()], lr=0.1)
for states in torch.randn(4, 6, 4):
    chance = torch.sigmoid(policy(states))
    drawn = torch.bernoulli(chance)
    log = drawn.detach() * chance.log() + (1 - drawn.detach()) * (1 - chance).log()
    soft = torch.sigmoid(straight(states))
    hard = torch.bernoulli(soft) + soft - soft.detach()
    labels = torch.empty(6, 1).uniform_(0.7, 1.2)
    loss = -(log.sum(1) * torch.randn(6)).mean() + hard.square().mean()
    loss = loss + F.binary_cross_entropy_with_logits(critic(states), labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
attacked = torch.randn(6, 4)
for step in range(3):
    attacked.requires_grad_()
    critic(attacked).sum().backward()
    attacked = (attacked + 0.1 * attacked.grad.sign()).detach()
""",
    ),
    Program(
        "slots that are normed behind the product, and masks of labels that are left out",
        """\
q, k, v, head = (nn.Linear(6, 6) for _ in range(4))
opt = torch.optim.SGD([p for part in (q, k, v, head) for p in part.parameters()], lr=0.05)
for x in torch.randn(4, 3, 5, 6):
    scores = q(x[:, :2]) @ k(x).transpose(1, 2)
    weights = scores.softmax(dim=1)
    slots = (weights @ v(x)) / weights.sum(-1, keepdim=True)
    labels = torch.randint(-1, 2, (3, 2, 6)).float()
    known = labels >= 0
    each = F.binary_cross_entropy_with_logits(head(slots), labels, reduction="none")
    loss = (each * known).sum() / known.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "second derivatives: of one column, as products with a vector, and of a network without a curve in one of its inputs",
        """\
model = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 1))
x = torch.rand(16, 2, requires_grad=True)
first = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
laplacian = sum(torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))
product = torch.autograd.grad(first, x, torch.randn_like(first), create_graph=True)[0]
weights = list(model.parameters())
slopes = torch.autograd.grad(model(x).square().mean(), weights, create_graph=True)
curves = torch.autograd.grad(sum(slope.sum() for slope in slopes), weights)
(laplacian.square().mean() + product.square().mean()).backward()
""",
    ),
    Program(
        "data that a cache and new labels change on purpose, and items that are copies",
        """\
class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows, self.labels, self.cache = torch.randn(12, 4), torch.zeros(12, dtype=torch.long), [torch.zeros(4) for _ in range(12)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index].clone()
        row -= row.mean()
        kept = self.cache[index]
        self.cache[index][:] = row
        return row + 0 * kept, self.labels[index]

data, model = Rows(), nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        data.labels[:] = model(data.rows).argmax(1)
""",
    ),
    Program(
        "second derivatives of samples whose columns do not meet",
        """\
x = torch.randn(3, 4, requires_grad=True)
y = (x ** 3 + torch.sin(x)).sum()
g = torch.autograd.grad(y, x, create_graph=True)[0]
h = torch.autograd.grad(g.sum(), x)[0]
print(torch.allclose(h, 6 * x - torch.sin(x), atol=1e-5))
""",
    ),
    Program(
        "a second derivative that is 0 as the last layer begins with zeros, and an encoder with ReLU elsewhere",
        """\
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
    def forward(self, a):
        return self.body(a)
class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 32); self.b = nn.Linear(32, 1)
        nn.init.zeros_(self.b.weight)
    def forward(self, x, z):
        return self.b(torch.tanh(self.a(torch.cat([x, z], 1))))
enc, field = Encoder(), Field()
opt = torch.optim.Adam([*enc.parameters(), *field.parameters()], 1e-2)
for step in range(60):
    x = torch.rand(64, 1, requires_grad=True)
    z = enc(torch.randn(64, 10))
    u = field(x, z)
    u_x = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]
    loss = ((u_xx + torch.sin(3 * x)) ** 2).mean() + (u * u).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "one long sequence, whose state goes from batch to batch",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.LSTM(3, 16, batch_first=True); self.o = nn.Linear(16, 1)
    def forward(self, x, state=None):
        h, state = self.r(x.unsqueeze(0), state)
        return self.o(h.squeeze(0)), state
m = Net(); opt = torch.optim.Adam(m.parameters(), 1e-2)
S = torch.randn(640, 3); T = (S + S.roll(1, 0))[:, :1]
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(S, T), batch_size=32, shuffle=False)
for epoch in range(3):
    state = None
    for x, y in loader:
        out, state = m(x, state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.mse_loss(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
    ),
    Program(
        "attention over one key in the first step, and gradients that are set by hand",
        """\
class Dec(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 16); self.q = nn.Linear(16, 16); self.out = nn.Linear(32, 4)
    def forward(self, x):
        h = torch.zeros(x.shape[0], 16); mem = []; outs = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h); mem.append(h)
            M = torch.stack(mem, 1)
            s = torch.einsum("bd,btd->bt", self.q(h), M)
            w = torch.softmax(s, dim=1)
            c = (w.unsqueeze(-1) * M).sum(1)
            outs.append(self.out(torch.cat([h, c], 1)))
        return torch.stack(outs, 1)
X = torch.randn(64, 5, 4)
m = Dec(); ps = list(m.parameters()); opt = torch.optim.Adam(ps, 1e-2)
for _ in range(40):
    loss = ((m(X)[:, :-1] - X[:, 1:].cumsum(1)) ** 2).mean()
    gs = torch.autograd.grad(loss, ps)
    for p, g in zip(ps, gs): p.grad = g
    opt.step()
print(loss.item())
""",
    ),
    Program(
        "a GAN's label for one picture at a time, each patch of it",
        """\
critic = nn.Conv2d(1, 1, 3)
opt = torch.optim.Adam(critic.parameters())
real = torch.ones(1)
for picture in torch.randn(6, 1, 1, 8, 8):
    loss = F.mse_loss(critic(picture).flatten(1), real) + F.mse_loss(critic(-picture).flatten(1), torch.zeros(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "the scores of one sample's words, added up before they are ranked, and pairs of all predictions",
        """\
net = nn.Linear(4, 1)
opt = torch.optim.Adam(net.parameters())
for good, bad in torch.randn(6, 2, 1, 5, 4):
    margin = (net(good) - net(bad)).flatten(1).sum()
    scores = net(torch.cat([good, bad]).flatten(0, 1))
    loss = -F.logsigmoid(margin) + F.relu(1 - scores + torch.randn(10)[:, None]).mean() + (scores * scores.T).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "one loss, gone through twice before each update, and a distribution of which all values are asked of all",
        """\
net = nn.Linear(4, 2)
opt = torch.optim.Adam(net.parameters())
grid = torch.linspace(-2, 2, 8)[:, None]
for x in torch.randn(6, 8, 4):
    mean, deviation = net(x).unbind(1)
    loss = torch.distributions.Normal(mean, deviation.exp()).log_prob(grid).logsumexp(1).mean() + mean.square().mean()
    opt.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "an outer product that is written with its dimension",
        """\
rate, decay = nn.Parameter(torch.rand(6)), torch.rand(6)
opt = torch.optim.Adam([rate])
for x in torch.randn(5, 4, 6):
    table = rate[:, None] * decay
    loss = (x @ table).square().mean() + 0.1 * table.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "the loss of each step, gone through once for each of several optimizers",
        """\
parts = [nn.Linear(4, 1) for _ in range(3)]
opts = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
x = torch.randn(8, 4)
for _ in range(6):
    loss = sum(part(x).square().mean() for part in parts)
    for at, opt in enumerate(opts):
        opt.zero_grad()
        loss.backward(retain_graph=at < 2)
        opt.step()
""",
    ),
)
