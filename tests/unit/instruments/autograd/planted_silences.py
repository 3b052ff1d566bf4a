"""What raises nothing: stale values, parameters that nothing trains, steps in the wrong order, the wrong mode."""

from tests.unit.instruments.autograd.case import Case

__all__ = ["CASES"]

_REMADE = (
    Case(
        name="layers that the forward makes, in a class whose parameters are updated by hand",
        kind="remade",
        text="""\
class Scorer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        h = nn.Linear(5, 7)(x).relu()  #> location
        return self.scale * nn.Linear(7, 1)(h)
scorer = Scorer(7)
for _ in range(5):
    loss = scorer(torch.randn(9, 5)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
""",
        edits=(
            ("nn.Linear(5, 7)(x)", "self.linear1(x)"),
            ("nn.Linear(7, 1)(h)", "self.linear2(h)"),
            (
                "self.scale = nn.Parameter(torch.ones(()))\n",
                (
                    "self.scale = nn.Parameter(torch.ones(()))\n"
                    "        self.linear1 = nn.Linear(5, 7)\n        self.linear2 = nn.Linear(7, 1)\n"
                ),
            ),
        ),
    ),
)
_LACKING = (
    Case(
        name="groups of weights and biases, without the weight that a module holds itself",
        kind="not_in_optimizer",
        text="""\
class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.ones(2))
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 6)
    def forward(self, x):
        return self.mix[0] * self.left(x) + self.mix[1] * self.right(x)
fused = nn.Sequential(Fused(), nn.ReLU(), nn.Linear(6, 1))
weights = [module.weight for module in fused.modules() if hasattr(module, "weight")]
biases = [module.bias for module in fused.modules() if hasattr(module, "bias")]
sgd = torch.optim.SGD([{"params": weights, "weight_decay": 1e-4}, {"params": biases}], lr=0.1)  #> location
for _ in range(4):
    loss = (fused(torch.randn(8, 4)) - 1).square().mean()
    sgd.zero_grad()
    loss.backward()
    sgd.step()
""",
        edits=(("lr=0.1)  #> location\n", "lr=0.1)  #> location\nsgd.add_param_group({'params': [fused[0].mix]})\n"),),
    ),
)
_SUMS = (
    Case(
        name="a parabola that is fitted by hand, with gradients that add up",
        kind="never_zeroed",
        text="""\
abc = torch.tensor([1.1, 1.1, 1.1], requires_grad=True)
time = torch.arange(20) / 20
speed = 3 * time * time - 2 * time + 1
for step in range(6):
    predicted = abc[0] * time ** 2 + abc[1] * time + abc[2]
    loss = (predicted - speed).square().mean()
    loss.backward()  #> location
    abc.data -= 0.1 * abc.grad
""",
        edits=(("    loss.backward()", "    abc.grad = None\n    loss.backward()"),),
    ),
)
_STALE = (
    Case(
        name="gradients are zeroed before the update of a network with BatchNorm",
        kind="zeroed_before_step",
        text="""\
net = nn.Sequential(nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.PReLU(6), nn.Linear(6, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in torch.utils.data.DataLoader([(torch.randn(3), number % 2) for number in range(16)], batch_size=4):
    loss = F.cross_entropy(net(x), y)
    seen = loss.item()
    loss.backward()  #> first
    opt.zero_grad()  #> location
    opt.step()
""",
        edits=(("    opt.zero_grad()  #> location\n", ""), ("    loss.backward()", "    opt.zero_grad()\n    loss.backward()")),
    ),
    Case(
        name="a fused Adam steps between the backwards of two losses",
        kind="stale_value",
        text="""\
shared = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
head_a, head_b = nn.Linear(8, 1), nn.Linear(8, 1)
params = [*shared.parameters(), *head_a.parameters(), *head_b.parameters()]
opt = torch.optim.Adam(params, lr=0.05, fused=True)
for x, ya, yb in [(torch.randn(8, 4), torch.randn(8, 1), torch.randn(8, 1)) for _ in range(2)]:
    z = shared(x)
    loss_a, loss_b = F.mse_loss(head_a(z), ya), F.mse_loss(head_b(z), yb)
    opt.zero_grad()
    loss_a.backward(retain_graph=True)
    opt.step()  #> location
    opt.zero_grad()
    loss_b.backward()
    opt.step()
""",
        edits=(
            (
                "    loss_a.backward(retain_graph=True)\n    opt.step()  #> location\n    opt.zero_grad()\n    loss_b.backward()\n",
                "    (loss_a + loss_b).backward()\n",
            ),
        ),
    ),
    Case(
        name="running statistics are replaced in eval mode, before the backward of what has a hook",
        kind="stale_value",
        text="""\
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
model[1].eval().requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.randn(3, 6, 4):
    hidden = model[0](x)
    hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
    loss = (model[1:](hidden) - 1).square().mean()
    model[1].running_var.data.copy_(hidden.detach().var(0))  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        tensors=("running_var", "1.running_var", "model.1.running_var"),
        edits=(
            ("    model[1].running_var.data.copy_(hidden.detach().var(0))  #> location\n", ""),
            ("    opt.step()\n", "    opt.step()\n    model[1].running_var.data.copy_(hidden.detach().var(0))\n"),
        ),
    ),
    Case(
        name="a NumPy buffer holds the next batch before backward",
        kind="stale_value",
        text="""\
import numpy as np

rng = np.random.default_rng(0)
buffer = np.empty((6, 4), dtype=np.float32)

def fill():
    buffer[:] = rng.standard_normal((6, 4))  #> location

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fill()
for step in range(3):
    x = torch.from_numpy(buffer)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    fill()  #> location
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("torch.from_numpy(buffer)", "torch.from_numpy(buffer.copy())"),),
    ),
    Case(
        name="small activations are zeroed through NumPy",
        kind="stale_value",
        text="""\
enc, dec = nn.Linear(6, 10), nn.Linear(10, 6)
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()])
for x in torch.randn(3, 8, 6):
    h = torch.sigmoid(enc(x))  #> saved
    codes = h.detach().numpy()
    codes[codes < 0.5] = 0  #> location
    loss = F.mse_loss(dec(h), x)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        tensors=("codes", "h"),
        edits=(("    codes = h.detach().numpy()\n    codes[codes < 0.5] = 0  #> location\n", "    h = h * (h >= 0.5)\n"),),
    ),
)

_NO_GRADIENT = (
    Case(
        name="the loss gets requires_grad because backward complained",
        kind="no_gradient",
        link="https://github.com/ronghuaiyang/arcface-pytorch/issues/56",
        parameters=("0.weight", "0.bias", "2.weight", "2.bias"),
        text="""\
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.MSELoss()
for data, label in [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(3)]:
    output = torch.max(model(data), 1)[1].float()  #> location
    loss = criterion(output, label.float())
    loss.requires_grad = True  #> location
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(
            (
                (
                    "    output = torch.max(model(data), 1)[1].float()  #> location\n    loss = criterion(output, label.float())\n"
                    "    loss.requires_grad = True  #> location\n"
                ),
                "    loss = F.cross_entropy(model(data), label)\n",
            ),
        ),
    ),
    Case(
        name="gates are rebuilt with torch.tensor in a forward",
        kind="no_gradient",
        parameters=("gate.weight", "gate.bias"),
        text="""\
class Highway(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate, self.h, self.out = nn.Linear(dim, 1), nn.Linear(dim, dim), nn.Linear(dim, 2)

    def forward(self, x):
        t = torch.tensor([torch.sigmoid(self.gate(row)).item() for row in x])[:, None]  #> location
        return self.out(t * F.relu(self.h(x)) + (1 - t) * x)

net = Highway(4)
opt = torch.optim.AdamW(net.parameters())
for x, y in [(torch.randn(3, 4), torch.randint(2, (3,))) for _ in range(2)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("torch.tensor([torch.sigmoid(self.gate(row)).item() for row in x])[:, None]", "torch.sigmoid(self.gate(x))"),),
    ),
    Case(
        name="a U-Net forgets one of its layers in forward",
        kind="no_gradient",
        parameters=("bottleneck.weight", "bottleneck.bias"),
        text="""\
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.bottleneck = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        d = F.relu(self.down(x))
        b = F.max_pool2d(d, 2)
        u = F.interpolate(F.relu(b), scale_factor=2)
        return self.up(torch.cat([d, u], 1))

model = UNet()
optimizer = torch.optim.Adam(model.parameters())
for image in torch.rand(3, 2, 1, 8, 8):
    loss = F.binary_cross_entropy_with_logits(model(image), (image > 0.5).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("F.interpolate(F.relu(b),", "F.interpolate(F.relu(self.bottleneck(b)),"),),
    ),
    Case(
        name="an encoder that should be fine-tuned stays under no_grad",
        kind="no_gradient",
        parameters=("encoder.weight_ih_l0", "encoder.weight_hh_l0", "encoder.bias_ih_l0", "encoder.bias_hh_l0", "embed.weight"),
        text="""\
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.encoder = nn.GRU(6, 8, batch_first=True)
        self.classifier = nn.Linear(8, 3)

    def forward(self, ids):
        with torch.no_grad():  #> location
            states, _ = self.encoder(self.embed(ids))
        return self.classifier(states)

tagger = Tagger()
optimizer = torch.optim.Adam(tagger.parameters(), lr=2e-5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
for ids, tags in [(torch.randint(10, (2, 5)), torch.randint(3, (2, 5))) for _ in range(3)]:
    loss = F.cross_entropy(tagger(ids).transpose(1, 2), tags)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
""",
        edits=(("        with torch.no_grad():  #> location\n            states", "        states"),),
    ),
)

_OPTIMIZER = (
    Case(
        name="two groups of parameters are collected and never appended",
        kind="not_in_optimizer",
        link="https://github.com/zjunlp/HVPNeT/issues/5",
        parameters=("crf.weight", "crf.bias", "fc.weight", "fc.bias"),
        text="""\
class HMNeT(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = nn.Linear(6, 8)
        self.encoder_conv = nn.Linear(8, 8)
        self.crf, self.fc = nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x):
        return self.crf(F.relu(self.fc(F.relu(self.encoder_conv(F.relu(self.bert(x)))))))

class Trainer:
    def __init__(self, model, lr=1e-3):
        self.model = model
        parameters = []
        params = {"lr": lr, "weight_decay": 1e-2, "params": []}
        for name, param in model.named_parameters():
            if "bert" in name:
                params["params"].append(param)
        parameters.append(params)
        params = {"lr": lr, "weight_decay": 1e-2, "params": []}
        for name, param in model.named_parameters():
            if "encoder_conv" in name:
                params["params"].append(param)
        parameters.append(params)
        params = {"lr": 5e-2, "weight_decay": 1e-2, "params": []}
        for name, param in model.named_parameters():
            if "crf" in name or name.startswith("fc"):
                params["params"].append(param)
        self.optimizer = torch.optim.AdamW(parameters)  #> location

    def train(self, steps=3):
        self.model.train()
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(torch.randn(4, 6)), torch.randint(3, (4,)))
            loss.backward()
            self.optimizer.step()

Trainer(HMNeT()).train()
""",
        edits=(
            (
                "        self.optimizer = torch.optim.AdamW(parameters)",
                "        parameters.append(params)\n        self.optimizer = torch.optim.AdamW(parameters)",
            ),
        ),
    ),
    Case(
        name="confidence training leaves out the module that was added",
        kind="not_in_optimizer",
        link="https://github.com/jwohlwend/boltz/issues/204",
        parameters=("structure.out_token_feat_update.weight", "structure.out_token_feat_update.bias"),
        text="""\
class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(5, 5)
        self.out_token_feat_update = nn.Linear(5, 5)

    def forward(self, x):
        with torch.no_grad():
            s = self.score(x)
        return self.out_token_feat_update(s)

class Boltz(nn.Module):
    def __init__(self):
        super().__init__()
        self.structure = Diffusion()
        self.confidence_module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
        self.structure.score.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.Adam(self.confidence_module.parameters(), lr=1e-3)  #> location

    def forward(self, x):
        return self.confidence_module(self.structure(x))

model = Boltz()
optimizer = model.configure_optimizers()
for step in range(3):
    x = torch.randn(6, 5)
    loss = F.mse_loss(model(x), x.norm(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("self.confidence_module.parameters(), lr", "[p for p in self.parameters() if p.requires_grad], lr"),),
    ),
    Case(
        name="a learnable temperature beside the model",
        kind="not_in_optimizer",
        tensors=(),
        text="""\
class SupCon(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_tau = nn.Parameter(torch.zeros(()))

    def forward(self, z, y):
        z = F.normalize(z)
        logits = z @ z.t() / self.log_tau.exp() - 1e9 * torch.eye(len(z))
        same = (y[:, None] == y) & ~torch.eye(len(z), dtype=torch.bool)
        return -(logits.log_softmax(1) * same).sum() / same.sum().clamp(min=1)

encoder, criterion = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)), SupCon()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)  #> location
for _ in range(3):
    loss = criterion(encoder(torch.randn(8, 6)), torch.randint(2, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("torch.optim.SGD(encoder.parameters(),", "torch.optim.SGD([*encoder.parameters(), *criterion.parameters()],"),),
    ),
    Case(
        name="the optimizer of another model",
        kind="stale_optimizer",
        text="""\
old, net, loss_fn = nn.Linear(4, 2), nn.Linear(4, 2), nn.CrossEntropyLoss()
opt = torch.optim.SGD(old.parameters(), 0.1)  #> location
for x, y in [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(4)]:
    opt.zero_grad()
    loss_fn(net(x), y).backward()
    opt.step()
""",
        edits=(("old.parameters()", "net.parameters()"),),
    ),
    Case(
        name="the classifier is replaced after the optimizer was made",
        kind="stale_optimizer",
        parameters=("fc.weight", "fc.bias"),
        text="""\
class ResNetish(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))

net = ResNetish(10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)  #> location
net.fc = nn.Linear(net.fc.in_features, 2)
net.train()
for images, labels in [(torch.randn(4, 3, 6, 6), torch.randint(2, (4,))) for _ in range(3)]:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
""",
        edits=(
            ("optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)  #> location\n", ""),
            ("net.train()\n", "net.train()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)\n"),
        ),
    ),
    Case(
        name="the discriminator of an inpainting network is never stepped",
        kind="never_stepped",
        link="https://github.com/zhaoyuzhi/deepfillv2/issues/6",
        text="""\
generator = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ELU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid())
discriminator = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-4)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-4)  #> location
for img in torch.rand(3, 2, 3, 8, 8):
    mask = (torch.rand(2, 1, 8, 8) < 0.3).float()
    optimizer_d.zero_grad()
    out = generator(torch.cat([img * (1 - mask), mask], 1))
    fake_scalar = discriminator(torch.cat([out.detach(), mask], 1))
    true_scalar = discriminator(torch.cat([img, mask], 1))
    loss_d = 0.5 * (F.softplus(fake_scalar).mean() + F.softplus(-true_scalar).mean())
    loss_d.backward()  #> location
    optimizer_g.zero_grad()
    loss_g = (out - img).abs().mean() - 0.1 * discriminator(torch.cat([out, mask], 1)).mean()
    loss_g.backward()
    optimizer_g.step()
""",
        edits=(("    loss_d.backward()  #> location\n", "    loss_d.backward()\n    optimizer_d.step()\n"),),
    ),
    Case(
        name="a trainer class updates its scaler and forgets scaler.step",
        kind="never_stepped",
        text="""\
class Trainer:
    def __init__(self, net):
        self.net = net
        self.optim = torch.optim.AdamW(net.parameters(), lr=1e-3)  #> location
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self, x, y):
        self.optim.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.net(x).float(), y)
        self.scaler.scale(loss).backward()  #> location
        self.scaler.unscale_(self.optim)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.update()
        return loss.item()

trainer = Trainer(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
history = [trainer.step(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(3)]
""",
        edits=(("        self.scaler.update()\n", "        self.scaler.step(self.optim)\n        self.scaler.update()\n"),),
    ),
    Case(
        name="model.zero_grad() clears what the generator's step needs",
        kind="zeroed_before_step",
        text="""\
G = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 4))
D = nn.Sequential(nn.Linear(4, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
opt_g, opt_d = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-3)
for real in torch.randn(3, 6, 4):
    fake = G(torch.randn(6, 3))
    D.zero_grad()
    d_loss = F.softplus(D(fake.detach())).mean() + F.softplus(-D(real)).mean()
    d_loss.backward()
    opt_d.step()
    g_loss = F.softplus(-D(fake)).mean()
    g_loss.backward()
    G.zero_grad()  #> location
    D.zero_grad()
    opt_g.step()
""",
        edits=(
            ("    G.zero_grad()  #> location\n", ""),
            ("    g_loss = F", "    G.zero_grad()\n    g_loss = F"),
        ),
    ),
    Case(
        name="gradients are set to None by a clean-up before the step",
        kind="zeroed_before_step",
        text="""\
class Learner:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Mish(), nn.Linear(6, 1))
        self.opt = torch.optim.RAdam(self.net.parameters())

    def cleanup(self):
        for p in self.net.parameters():
            p.grad = None  #> location

    def fit(self, n):
        for _ in range(n):
            x = torch.randn(5, 3)
            loss = (self.net(x) - x.mean(1, keepdim=True)).abs().mean()
            loss.backward()
            self.cleanup()  #> location
            self.opt.step()

Learner().fit(3)
""",
        edits=(
            (
                "            self.cleanup()  #> location\n            self.opt.step()\n",
                "            self.opt.step()\n            self.cleanup()\n",
            ),
        ),
    ),
    Case(
        name="backward is not called at all",
        kind="stepped_without_backward",
        text="""\
model = nn.LSTM(3, 6, batch_first=True)
head = nn.Linear(6, 1)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
for epoch in range(3):
    x = torch.randn(4, 5, 3)
    loss = F.mse_loss(head(model(x)[0][:, -1]), x.sum((1, 2))[:, None])
    optimizer.zero_grad()
    optimizer.step()  #> location
""",
        edits=(("    optimizer.step()  #> location\n", "    loss.backward()\n    optimizer.step()\n"),),
    ),
    Case(
        name="backward runs for the wrong network",
        kind="stepped_without_backward",
        also=("no_gradient",),
        text="""\
teacher, student = nn.Linear(4, 3), nn.Linear(4, 3)
opt = torch.optim.SGD(student.parameters(), lr=0.1)
opt_t = torch.optim.SGD(teacher.parameters(), lr=0.1)
for x, y in [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]:
    loss = F.cross_entropy(teacher(x), y)
    opt.zero_grad()
    opt_t.zero_grad()
    loss.backward()
    opt_t.step()
    distilled = F.kl_div(student(x).log_softmax(1), teacher(x).softmax(1).detach(), reduction="batchmean")
    opt.step()  #> location
""",
        edits=(("    opt.step()  #> location\n", "    distilled.backward()\n    opt.step()\n"),),
    ),
    Case(
        name="backward stands in a branch that is never taken",
        kind="stepped_without_backward",
        text="""\
def train(model, data, use_amp=False):
    opt = torch.optim.RMSprop(model.parameters())
    model.train()
    for x, y in data:
        opt.zero_grad()
        loss = F.l1_loss(model(x), y)
        if use_amp:
            loss.backward()
        opt.step()  #> location

train(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1)), [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)])
""",
        edits=(("        if use_amp:\n            loss.backward()\n", "        loss.backward()\n"),),
    ),
)

_MODES = (
    Case(
        name="gradients stay off after an evaluation, and the loss is forced",
        kind="grad_disabled",
        also=("no_gradient", "stepped_without_backward"),
        text="""\
net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
opt = torch.optim.Adam(net.parameters())

def validate(x, y):
    torch.set_grad_enabled(False)  #> location
    return F.mse_loss(net(x), y).item()

x, y = torch.randn(6, 3), torch.randn(6, 1)
validate(x, y)
for step in range(3):
    loss = F.mse_loss(net(x), y)
    loss.requires_grad = True
    opt.zero_grad()
    loss.backward()
    opt.step()
torch.set_grad_enabled(True)
""",
        edits=(
            (
                "    torch.set_grad_enabled(False)  #> location\n    return F.mse_loss(net(x), y).item()\n",
                "    with torch.no_grad():\n        return F.mse_loss(net(x), y).item()\n",
            ),
            ("    loss.requires_grad = True\n", ""),
        ),
    ),
    Case(
        name="the forward of a training step is inside a no_grad block",
        kind="grad_disabled",
        also=("no_gradient", "stepped_without_backward"),
        text="""\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, x):
        return self.dec(F.elu(self.enc(x)))

model = Model()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for batch in torch.randn(3, 4, 6):
    optimizer.zero_grad()
    with torch.no_grad():  #> location
        out = model(batch)
        loss = F.mse_loss(out, batch)
    loss.requires_grad_()
    loss.backward()
    optimizer.step()
""",
        edits=(
            (
                (
                    "    with torch.no_grad():  #> location\n        out = model(batch)\n        loss = F.mse_loss(out, batch)\n"
                    "    loss.requires_grad_()\n"
                ),
                "    out = model(batch)\n    loss = F.mse_loss(out, batch)\n",
            ),
        ),
    ),
    Case(
        name="a loaded model is fine-tuned as it was saved for inference",
        kind="train_in_eval_mode",
        text="""\
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5))
        self.fc = nn.Linear(64, 2)

    def forward(self, x):
        return self.fc(self.features(x))

def load(state):
    model = Classifier()
    model.load_state_dict(state)
    model.eval()
    return model

model = load(Classifier().state_dict())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in [(torch.randn(4, 1, 6, 6), torch.randint(2, (4,))) for _ in range(4)]:
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("opt = torch.optim.SGD", "model.train()\nopt = torch.optim.SGD"),),
    ),
    Case(
        name="a tiny BERT is trained after .eval()",
        kind="train_in_eval_mode",
        text="""\
from transformers import BertConfig, BertForSequenceClassification

sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
config = BertConfig(vocab_size=20, max_position_embeddings=16, **sizes)
model = BertForSequenceClassification(config)
model.eval()
with torch.no_grad():
    before = model(torch.randint(20, (2, 6))).logits
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    out = model(input_ids=torch.randint(20, (4, 6)), labels=torch.randint(2, (4,)))
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        edits=(("optimizer = torch", "model.train()\noptimizer = torch"),),
    ),
    Case(
        name="predictions with a graph, in training mode",
        kind="eval_in_train_mode",
        text="""\
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
x, classes = torch.randn(10, 4), []
for rows in x.split(2):
    out = F.softmax(net(rows), dim=1)  #> location
    classes.append(int(out.detach().numpy().argmax()))
""",
        edits=(("    out = F", "    net.eval()\n    out = F"),),
    ),
    Case(
        name="predictions of a test set under inference_mode, dropout on",
        kind="eval_in_train_mode",
        text="""\
class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 8)
        self.convs = nn.ModuleList(nn.Conv1d(8, 4, k) for k in (2, 3))
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, ids):
        e = self.emb(ids).transpose(1, 2)
        return self.fc(self.drop(torch.cat([F.relu(c(e)).amax(-1) for c in self.convs], 1)))

clf = TextCNN()
opt = torch.optim.Adam(clf.parameters(), lr=1e-3)
for ids, y in [(torch.randint(30, (4, 7)), torch.randint(2, (4,))) for _ in range(3)]:
    loss = F.cross_entropy(clf(ids), y)
    opt.zero_grad()
    loss.backward()
    opt.step()

preds = []
with torch.inference_mode():
    for ids in torch.randint(30, (3, 4, 7)):
        preds.append(clf(ids).softmax(1)[:, 1])  #> location
print(torch.cat(preds).mean())
""",
        edits=(("preds = []\n", "preds = []\nclf.eval()\n"),),
    ),
    Case(
        name="probabilities of a segmentation are reshaped, then cross_entropy",
        kind="double_softmax",
        text="""\
seg = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Softmax(1))
opt = torch.optim.Adam(seg.parameters())
for img, mask in [(torch.rand(2, 3, 5, 5), torch.randint(4, (2, 5, 5))) for _ in range(3)]:
    prob = seg(img)  #> location
    prob = prob.permute(0, 2, 3, 1).reshape(-1, 4)
    loss = F.cross_entropy(prob, mask.reshape(-1), ignore_index=0)  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=((", nn.Softmax(1)", ""),),
    ),
    Case(
        name="knowledge distillation: softmax, then log_softmax, then KL",
        kind="double_softmax",
        text="""\
import copy

student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
teacher = nn.Linear(6, 5).requires_grad_(False).eval()
opt = torch.optim.AdamW(student.parameters())
for x, y in [(torch.randn(4, 6), torch.randint(5, (4,))) for _ in range(3)]:
    p = F.softmax(student(x), dim=-1)  #> location
    with torch.no_grad():
        q = F.softmax(teacher(x), dim=-1)
    loss = nn.CrossEntropyLoss()(p, y) + F.kl_div(p.log(), q, reduction="batchmean")  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("nn.CrossEntropyLoss()(p, y)", "F.nll_loss(p.log(), y)"),),
    ),
    Case(
        name="attention is normalised over the batch",
        kind="leaking_batch",
        text="""\
class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.out = nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x):
        w = torch.softmax(self.score(x), dim=0)  #> location
        return self.out((w * x).sum(1))

net = Pool()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(5, 6, 4), torch.randint(3, (5,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("dim=0)", "dim=1)"),),
    ),
    Case(
        name="predictions of one column against a flat target",
        kind="broadcast",
        text="""\
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(6, 4), torch.randn(6)) for _ in range(3)]:
    loss = F.mse_loss(net(x), y)  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("net(x), y", "net(x).squeeze(-1), y"),),
    ),
)

_COPIES = (
    Case(
        name="a penalty is detached, in each of several trainings",
        kind="wasted_term",
        text="""\
def train(weight):
    net = nn.Linear(4, 1)
    opt = torch.optim.Adam(net.parameters(), lr=0.1)
    for x, y in [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(150)]:
        out = net(x)
        size = out.detach()  #> location
        loss = F.mse_loss(out, y) + weight * size.pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

for weight in (0.1, 1.0, 10.0):
    train(weight)
""",
        edits=(("out.detach()", "out"),),
    ),
    Case(
        name="two layers without an activation",
        kind="no_activation",
        text="""\
net = nn.Sequential(  #> location
    nn.Linear(2, 8), nn.Linear(8, 1), nn.Sigmoid()
)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(6, 2), torch.rand(6, 1)) for _ in range(3)]:
    loss = F.binary_cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("nn.Linear(2, 8), nn", "nn.Linear(2, 8), nn.ReLU(), nn"),),
    ),
    Case(
        name="scores of a picture become rows without their channels",
        kind="scrambled",
        text="""\
net = nn.Conv2d(3, 5, 3, padding=1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(2, 3, 6, 4), torch.randint(5, (2, 6, 4))) for _ in range(3)]:
    scores = net(x)
    loss = F.cross_entropy(scores.view(-1, 5), y.flatten())  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("scores.view(-1, 5)", "scores.permute(0, 2, 3, 1).reshape(-1, 5)"),),
    ),
    Case(
        name="steps and channels change places in a view for a recurrent net",
        kind="scrambled",
        text="""\
conv, rnn, head = nn.Conv2d(1, 6, 3, padding=1), nn.LSTM(30, 8, batch_first=True), nn.Linear(8, 1)
opt = torch.optim.SGD([*conv.parameters(), *rnn.parameters(), *head.parameters()], lr=0.1)
for x, y in [(torch.randn(4, 1, 9, 5), torch.randn(4, 1)) for _ in range(3)]:
    features = conv(x)
    steps = features.view(4, -1, 9)  #> location
    out, _ = rnn(steps.transpose(1, 2))
    loss = F.mse_loss(head(out[:, -1]), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("features.view(4, -1, 9)", "features.transpose(2, 3).reshape(4, -1, 9)"),),
    ),
    Case(
        name="all steps get one row of the positions",
        kind="one_row",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.randn(1, 20, 6))
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0.0)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = x + self.positions[:, x.shape[1], :]  #> location
        return self.head(self.layer(x).mean(1))

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(4, 9, 6), torch.randint(2, (4,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("x.shape[1], :]", ":x.shape[1], :]"),),
    ),
    Case(
        name="a mask multiplies a divergence that is one number",
        kind="early_reduction",
        text="""\
encoder, decoder = nn.Linear(5, 8), nn.Linear(4, 5)
opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
for x, mask in [(torch.randn(6, 7, 5), (torch.rand(6, 7) > 0.3).float()) for _ in range(3)]:
    mean, log_var = encoder(x).chunk(2, -1)
    rebuilt = decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp())
    divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())  #> location
    loss = (((rebuilt - x) ** 2).sum(-1) * mask + divergence * mask).sum() / mask.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("log_var.exp())  #", "log_var.exp(), dim=-1)  #"),),
    ),
    Case(
        name="the weights of samples meet a loss that is an average",
        kind="early_reduction",
        text="""\
net = nn.Linear(5, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
for x, y, weights in [(torch.randn(6, 5), torch.randint(3, (6,)), torch.rand(6)) for _ in range(3)]:
    loss = (criterion(net(x), y) * weights).mean()  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(reduction='none')"),),
    ),
    Case(
        name="an activation whose result is not kept",
        kind="dropped_result",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x)
        F.relu(h)  #> location
        return self.last(h)

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ops=("relu",),
        also=("no_activation",),
        edits=(("F.relu(h)", "h = F.relu(h)"),),
    ),
    Case(
        name="another shape that is not kept, and that the step does without",
        kind="dropped_result",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = F.relu(self.first(x))
        h.unsqueeze(1)  #> location
        return self.last(h)

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ops=("unsqueeze",),
        edits=(("        h.unsqueeze(1)  #> location\n", ""),),
    ),
    Case(
        name="the model is updated on what it is tested on",
        kind="train_in_eval_mode",
        text="""\
net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
test_batches = [(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(3)]
net.eval()
for x, y in test_batches:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()  #> location
""",
        edits=(("    loss.backward()\n    opt.step()  #> location\n", ""),),
    ),
    Case(
        name="validation on samples that are trained on",
        kind="evaluated_on_training",
        text="""\
from torch.utils.data import DataLoader, TensorDataset
x, y = torch.randn(60, 4), torch.randn(60, 1)
train_loader = DataLoader(TensorDataset(x[:-20], y[:-20]), batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(x[20:], y[20:]), batch_size=20)  #> location
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for inputs, targets in train_loader:
        loss = F.mse_loss(net(inputs), targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        for inputs, targets in val_loader:
            loss = F.mse_loss(net(inputs), targets)
""",
        edits=(("x[20:], y[20:]", "x[-20:], y[-20:]"),),
    ),
    Case(
        name="each picture is there with both labels",
        kind="contradicting_labels",
        text="""\
from torch.utils.data import DataLoader, Dataset
class Pairs(Dataset):
    def __init__(self):
        self.covers = torch.rand(32, 3, 4, 4)
        self.hidden = self.covers + 0.1 * torch.rand(32, 3, 4, 4)
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return torch.stack([self.covers[i], self.covers[i]]), torch.tensor([[0], [1]])
def joined(pairs):
    return torch.cat([pictures for pictures, _ in pairs]), torch.cat([labels for _, labels in pairs])
loader = DataLoader(Pairs(), batch_size=4, shuffle=True, collate_fn=joined)  #> location
net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in loader:
    loss = F.cross_entropy(net(x), y.squeeze(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("self.covers[i], self.covers[i]", "self.covers[i], self.hidden[i]"),),
    ),
    Case(
        name="a picture with its channels last becomes one with its channels first",
        kind="scrambled",
        text="""\
net = nn.Conv2d(3, 2, 3, padding=1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.rand(2, 9, 6, 3), torch.randint(2, (2, 9, 6))) for _ in range(3)]:
    scores = net(x.view(2, 3, 9, 6))  #> location
    loss = F.cross_entropy(scores, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("x.view(2, 3, 9, 6)", "x.permute(0, 3, 1, 2)"),),
    ),
    Case(
        name="a softmax of a single output",
        kind="no_gradient",
        text="""\
net = nn.Linear(5, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(6, 5), torch.rand(6, 1).round()) for _ in range(4)]:
    loss = F.binary_cross_entropy(torch.softmax(net(x), 1), y)  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ops=("softmax",),
        edits=(("torch.softmax(net(x), 1)", "torch.sigmoid(net(x))"),),
    ),
    Case(
        name="the best model is the one that is trained",
        kind="shared_memory",
        text="""\
net = nn.Linear(5, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
best, lowest = None, 1e9
for x, y in [(torch.randn(6, 5), torch.randn(6, 1)) for _ in range(4)]:
    loss = F.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if loss.item() < lowest:
        lowest = loss.item()
        best = net  #> location
""",
        tensors=("best",),
        edits=(("best = net", "import copy\nbest = copy.deepcopy(net)"),),
    ),
    Case(
        name="the best state is none, as it is no copy",
        kind="shared_memory",
        text="""\
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
best, best_loss = None, float("inf")
for x, y in [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(5)]:
    loss = F.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if loss.item() < best_loss or best is None:
        best, best_loss = net.state_dict(), loss.item()  #> location
opt.step()
net.load_state_dict(best)
""",
        edits=(("net.state_dict()", "{name: value.clone() for name, value in net.state_dict().items()}"),),
    ),
    Case(
        name="the statistics of a frozen part go on",
        kind="frozen_statistics",
        text="""\
net = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.Tanh(), nn.Linear(8, 1))
net[0].requires_grad_(False).eval()
opt = torch.optim.SGD(net[2].parameters(), lr=0.1)
for x, y in [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(3)]:
    net.train()  #> location
    loss = F.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("    net.train()", "    net.train(); net[0].eval()"),),
    ),
    Case(
        name="a function of the user's returns its derivative, and not the gradient",
        kind="wrong_backward",
        text="""\
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x  #> location

net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for x, y in [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(3)]:
    loss = F.mse_loss(Square.apply(net(x)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("return 2 * x", "return grad * 2 * x"),),
    ),
    Case(
        name="a loader drops its only batch",
        kind="no_batches",
        text="""\
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
loader = torch.utils.data.DataLoader(data, batch_size=32, drop_last=True)  #> location
for epoch in range(2):
    for x, y in loader:  #> saved
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        tensors=("loader",),
        edits=((", drop_last=True", ""),),
    ),
    Case(
        name="a subset that holds nothing",
        kind="no_batches",
        text="""\
data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
subset = torch.utils.data.Subset(data, [i for i in range(20) if i > 20])
loader = torch.utils.data.DataLoader(subset, batch_size=4)  #> location
total = 0
for i, (x, y) in enumerate(loader):  #> saved
    total += len(x)
""",
        tensors=("loader",),
    ),
    Case(
        name="a target with four values for each prediction",
        kind="broadcast",
        text="""\
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(3)]:
    loss = F.mse_loss(net(x), y)  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Case(
        name="a data set that is sorted by class",
        kind="sorted_batches",
        text="""\
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
labels = torch.arange(3).repeat_interleave(70)
data = torch.utils.data.TensorDataset(torch.randn(210, 4) + labels[:, None], labels)
loader = torch.utils.data.DataLoader(data, batch_size=16)  #> location
for epoch in range(2):
    for x, y in loader:  #> saved
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        tensors=("loader",),
        edits=(("batch_size=16", "batch_size=16, shuffle=True"),),
    ),
    Case(
        name="a loop over a loader that uses another batch",
        kind="unread_batches",
        text="""\
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
x, y = next(iter(loader))
for epoch in range(2):
    for number, (inputs, labels) in enumerate(loader):  #> location
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        tensors=("inputs",),
    ),
    Case(
        name="the share of one batch, of the whole data set",
        kind="miscounted",
        text="""\
data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
loader = torch.utils.data.DataLoader(data, batch_size=6)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step, (x, y) in enumerate(loader):
    out = net(x)
    loss = F.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 2 == 0:
        right = out.argmax(1).eq(y).sum()
        accuracy = 100 * right.item() / len(loader.dataset)  #> location
""",
        tensors=("right",),
        edits=(("len(loader.dataset)", "len(y)"),),
    ),
    Case(
        name="losses divided by the whole data set, of which samplers give parts",
        kind="miscounted",
        text="""\
data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(3, (100,)))
train, valid = (torch.utils.data.SubsetRandomSampler(part) for part in (range(80), range(80, 100)))
train_loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=train)
valid_loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=valid)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
total, lost = 0.0, 0.0
for x, y in train_loader:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item() * len(x)
with torch.no_grad():
    for x, y in valid_loader:
        lost += F.cross_entropy(net(x), y, reduction="sum").item()
total = total / len(train_loader.dataset)  #> location
lost /= len(valid_loader.dataset)
""",
        tensors=("train_loader",),
        edits=(("len(train_loader.dataset)", "len(train_loader.sampler)"), ("len(valid_loader.dataset)", "len(valid_loader.sampler)")),
    ),
    Case(
        name="a sum of losses that the next line overwrites",
        kind="wasted_term",
        text="""\
body, kind, place = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)
opt = torch.optim.SGD([*body.parameters(), *kind.parameters(), *place.parameters()], lr=0.1)
for x, y, z in [(torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8, 2)) for _ in range(3)]:
    h = body(x).relu()
    kind_loss = F.cross_entropy(kind(h), y)
    place_loss = F.mse_loss(place(h), z)
    total = kind_loss * 1.0 + place_loss * 2.0  #> saved
    print({"kind": kind_loss.item(), "place": place_loss.item(), "total": total.item()})
    total = kind_loss * 1.0  #> location
    opt.zero_grad()
    total.backward()
    opt.step()
""",
        tensors=("total",),
        edits=(("    total = kind_loss * 1.0  #> location\n", ""),),
        also=("no_gradient",),
    ),
    Case(
        name="a module that is given an attribute requires_grad",
        kind="frozen_in_vain",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.body(x).relu())
net = Net()
net.head.requires_grad = False  #> location
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]:
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
        module="head",
        edits=(("net.head.requires_grad = False", "net.head.requires_grad_(False)"),),
    ),
    Case(
        name="the place of the largest score of one, in an evaluation with gradients after many steps",
        kind="compared_scores",
        text="""\
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in [(torch.randn(8, 4), torch.randint(2, (8, 1)).float()) for _ in range(30)]:
        net.train()
        opt.zero_grad()
        F.binary_cross_entropy_with_logits(net(x), y).backward()
        opt.step()
    net.eval()
    _, best = torch.max(net(x).data, 1)  #> location
    hits = (best == y[:, 0]).sum()
""",
        edits=(("_, best = torch.max(net(x).data, 1)", "best = (net(x).data > 0).long().squeeze(-1)"),),
    ),
    Case(
        name="the place of the largest probability of one",
        kind="compared_scores",
        text="""\
net = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(2, (8, 1)).float()) for _ in range(3)]:
    out = net(x)
    opt.zero_grad()
    F.binary_cross_entropy(out, y).backward()
    opt.step()
    hits = (out.argmax(dim=1) == y[:, 0]).sum()  #> location
""",
        edits=(("out.argmax(dim=1)", "(out > 0.5).long().squeeze(-1)"),),
    ),
    Case(
        name="the target of cross_entropy before the output",
        kind="loss_input",
        text="""\
net = nn.Linear(4, 3)
criterion = nn.CrossEntropyLoss()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.softmax(torch.randn(8, 3), 1)) for _ in range(3)]:
    loss = criterion(y, net(x))  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("criterion(y, net(x))", "criterion(net(x), y)"),),
    ),
    Case(
        name="the target of binary_cross_entropy_with_logits before the output",
        kind="loss_input",
        text="""\
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(2, (8, 1)).float()) for _ in range(3)]:
    loss = F.binary_cross_entropy_with_logits(y, net(x))  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("(y, net(x))", "(net(x), y)"),),
    ),
    Case(
        name="a divergence of probabilities",
        kind="loss_input",
        text="""\
net = nn.Linear(4, 3)
criterion = nn.KLDivLoss(reduction="batchmean")
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.softmax(torch.randn(8, 3), 1)) for _ in range(3)]:
    out = F.softmax(net(x), dim=1)  #> location
    loss = criterion(out, y)  #> saved
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("F.softmax", "F.log_softmax"),),
    ),
    Case(
        name="a sigmoid before cross_entropy",
        kind="loss_input",
        text="""\
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Sigmoid())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=((", nn.Sigmoid()", ""),),
    ),
    Case(
        name="a ReLU on the logits",
        kind="loss_input",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.first(x))
        return F.relu(self.last(x))  #> location

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)  #> saved
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("F.relu(self.last(x))", "self.last(x)"),),
    ),
    Case(
        name="nll_loss of logits",
        kind="loss_input",
        text="""\
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]:
    loss = F.nll_loss(net(x), y)  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("F.nll_loss", "F.cross_entropy"),),
    ),
    Case(
        name="nll_loss of probabilities",
        kind="loss_input",
        text="""\
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(dim=1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]:
    loss = F.nll_loss(net(x), y)  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("nn.Softmax", "nn.LogSoftmax"),),
    ),
    Case(
        name="targets that a tanh cannot give",
        kind="loss_input",
        text="""\
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Tanh())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), 20 * torch.rand(8, 1)) for _ in range(3)]:
    loss = F.mse_loss(net(x), y)  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=((", nn.Tanh()", ""),),
    ),
    Case(
        name="the results of a loop are its own variable",
        kind="no_gradient",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(8, 2)

    def forward(self, *parts):
        for i, part in enumerate(parts):
            part = torch.relu(self.units[i](part))  #> location
        return self.head(torch.cat(parts, 1))

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x, x + 1), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(
            (
                "for i, part in enumerate(parts):\n            part = torch.relu(self.units[i](part))",
                "parts = [torch.relu(self.units[i](part)) for i, part in enumerate(parts)]",
            ),
        ),
    ),
    Case(
        name="log-probabilities out of a memory of pairs become a new tensor",
        kind="no_gradient",
        text="""\
net, value = nn.Linear(4, 2), nn.Linear(4, 1)
opt = torch.optim.SGD([*net.parameters(), *value.parameters()], lr=0.1)
for _ in range(3):
    memory = []
    for x in torch.randn(5, 4):
        action = torch.distributions.Categorical(logits=net(x))
        memory.append((value(x), action.log_prob(torch.tensor(1))))
    log_probs = torch.tensor([pair[1] for pair in memory])  #> location
    values = torch.stack([pair[0] for pair in memory]).squeeze(1)
    loss = (values * values).mean() - log_probs.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("torch.tensor([pair[1]", "torch.stack([pair[1]"),),
    ),
    Case(
        name="the validation set is not scaled",
        kind="evaluated_on_bytes",
        text="""\
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
pictures = torch.randint(256, (12, 6))
for epoch in range(2):
    net.train()
    for x in pictures.split(4):
        loss = F.cross_entropy(net(x / 255), torch.randint(2, (4,)))  #> saved
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        right = (net(pictures.float()).argmax(1) == 1).sum()  #> location
""",
        edits=(("pictures.float()", "pictures / 255"),),
    ),
    Case(
        name="a cell that only evaluates, with a model of a dict that was trained before",
        kind="eval_in_train_mode",
        text="""\
from torch.utils.data import DataLoader
config = {"net": nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))}
with torch.no_grad():
    for x in DataLoader(torch.randn(32, 4), batch_size=8):
        out = config["net"](x)  #> location
""",
        edits=(('        out = config["net"](x)', "        config['net'].eval()\n        out = config[\"net\"](x)"),),
    ),
    Case(
        name="a list of one module, multiplied",
        kind="shared_memory",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4)] * 3)  #> location
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        for part in self.parts:
            x = torch.relu(part(x))
        return self.head(x)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]:
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
        edits=(("[nn.Linear(4, 4)] * 3", "[nn.Linear(4, 4) for _ in range(3)]"),),
    ),
    Case(
        name="a method that is named and not called",
        kind="stepped_without_backward",
        text="""\
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(16, 4), torch.randn(16, 1)
for step in range(4):
    opt.zero_grad()
    loss = F.mse_loss(net(x), y)
    loss.backward  #> location
    opt.step()
""",
        edits=(("loss.backward  #", "loss.backward()  #"),),
    ),
)

CASES = _REMADE + _LACKING + _SUMS + _STALE + _NO_GRADIENT + _OPTIMIZER + _MODES + _COPIES
