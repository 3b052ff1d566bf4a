"""Models whose output for one sample depends on another sample."""

from tests.unit.instruments.autograd.case import Case

__all__ = ["CASES"]

CASES = (
    Case(
        name="self-attention takes the batch for the sequence",
        kind="leaking_batch",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2)  #> location
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        a, _ = self.attn(x, x, x)  #> saved
        return self.fc((x + a).mean(1))

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(7, 5, 4), torch.randint(3, (7,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        module="attn",
        edits=(("nn.MultiheadAttention(4, 2)", "nn.MultiheadAttention(4, 2, batch_first=True)"),),
    ),
    Case(
        name="a softmax module over dimension 0 of feature maps",
        kind="leaking_batch",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(2, 4, 1)
        self.s = nn.Softmax(dim=0)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        a = self.s(self.c(x))  #> location
        return self.fc((a * self.c(x)).mean((2, 3)))

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(7, 2, 6, 6), torch.randint(3, (7,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ops=("softmax",),
        module="s",
        edits=(("nn.Softmax(dim=0)", "nn.Softmax(dim=-1)"),),
    ),
    Case(
        name="attention of a language model over the wrong dimension",
        kind="leaking_batch",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(11, 6)
        self.q = nn.Linear(6, 6)
        self.fc = nn.Linear(6, 11)

    def forward(self, x):
        h = self.e(x)
        s = self.q(h) @ h.transpose(1, 2)
        return self.fc(F.softmax(s, 0) @ h)  #> location

net = Net()
opt = torch.optim.Adam(net.parameters())
for x, y in [(torch.randint(11, (4, 6)), torch.randint(11, (4, 6))) for _ in range(3)]:
    logits = net(x)
    loss = F.cross_entropy(logits.reshape(-1, 11), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ops=("softmax",),
        edits=(("F.softmax(s, 0)", "F.softmax(s, -1)"),),
    ),
    Case(
        name="batch and steps are exchanged by a reshape that divides evenly",
        kind="scrambled",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        B, T, C = x.shape
        out, _ = self.rnn(x.reshape(T, B, C))  #> location
        return self.fc(out[-1])

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(4, 20, 3), torch.randint(3, (4,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("x.reshape(T, B, C)", "x.transpose(0, 1)"),),
    ),
    Case(
        name="steps come first, and are viewed as features of a sample",
        kind="scrambled",
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 6, batch_first=True)
        self.fc = nn.Linear(6 * 8, 3)

    def forward(self, x):
        out, _ = self.rnn(x)
        out = out.transpose(0, 1).contiguous()
        return self.fc(out.view(x.size(0), -1))  #> location

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(4, 8, 3), torch.randint(3, (4,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("out.view(x.size(0), -1)", "out.transpose(0, 1).reshape(x.size(0), -1)"),),
    ),
    Case(
        name="the mean of the advantages over all samples",
        kind="leaking_batch",
        text="""\
class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.advantage = nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x):
        value, advantage = self.value(x), self.advantage(x)
        return value + advantage - advantage.mean()  #> location

net = Dueling()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("advantage.mean()", "advantage.mean(dim=1, keepdim=True)"),),
    ),
    Case(
        name="a softmax module over the samples, in a cell that trains nothing",
        link="https://m.jb51.cc/faq/1816202.html",
        kind="leaking_batch",
        text="""\
net = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2), nn.Softmax(dim=0))  #> location
batch = torch.rand(3, 9)
print(net(batch).detach())
print([net(row).detach() for row in batch])
""",
        ops=("softmax",),
        module="3",
        edits=(("nn.Softmax(dim=0)", "nn.Softmax(dim=-1)"),),
    ),
    Case(
        name="the advantages less their mean over the batch",
        link="https://github.com/PacktPublishing/Deep-Reinforcement-Learning-Hands-On/issues/52",
        kind="leaking_batch",
        text="""\
class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.adv, self.val = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        adv = self.adv(x)
        return self.val(x) + adv - adv.mean()  #> location

net = Dueling()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
states = torch.randn(4, 6)[[0, 0, 1, 2, 3, 1, 2]]
for step in range(3):
    loss = F.mse_loss(net(states).gather(1, torch.zeros(7, 1, dtype=torch.long)).squeeze(1), torch.ones(7))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ops=("mean",),
        edits=(("adv.mean()", "adv.mean(dim=1, keepdim=True)"),),
    ),
    Case(
        name="a checkpoint that is read and put into no model",
        link="https://github.com/cfzd/Ultra-Fast-Lane-Detection/issues/205",
        kind="never_loaded",
        door="magic",
        text="""\
import io

trained = nn.Linear(4, 2)
file = io.BytesIO()
torch.save({"model": trained.state_dict()}, file)
file.seek(0)
net = nn.Linear(4, 2)
state_dict = torch.load(file)["model"]  #> location
with torch.no_grad():
    print(net(torch.ones(1, 4)))
""",
        tensors=("state_dict",),
        edits=(("    print(net", "    net.load_state_dict(state_dict)\n    print(net"),),
    ),
    Case(
        name="an accuracy of the training data where nothing reads the data for validation",
        kind="evaluated_on_training",
        text="""\
train_x, train_y = torch.randn(64, 6), torch.randint(2, (64,))
val_x, val_y = torch.randn(32, 6), torch.randint(2, (32,))
net = nn.Linear(6, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def accuracy(x, y):
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()

for step in range(4):
    loss = F.cross_entropy(net(train_x), train_y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    val_accuracy = accuracy(train_x, train_y)  #> location
""",
        tensors=("train_x",),
        edits=(("accuracy(train_x, train_y)  #", "accuracy(val_x, val_y)  #"),),
    ),
    Case(
        name="training mode is switched on in the loop of the validation",
        link="https://github.com/pliang279/MultiBench/issues/26",
        kind="eval_in_train_mode",
        text="""\
net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
batches = [(torch.randn(8, 6), torch.randint(2, (8,))) for _ in range(4)]
for epoch in range(2):
    net.train()
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        for x, y in batches:
            net.train()
            right = net(x).argmax(1) == y  #> location
""",
        edits=(("        for x, y in batches:\n            net.train()\n", "        for x, y in batches:\n"),),
    ),
)
