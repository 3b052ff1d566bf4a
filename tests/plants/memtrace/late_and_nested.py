"""Leaks that begin late, come rarely, or stand in functions, optimizers and copies."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, OUT, growth, plant

PLANTS = (
    plant("two-at-once", growth("features[0]", KEPT, KEPT + OUT, "features") | {"growth.others": ("outs",)})("""
        outs, features = [], []
        for a, b in batches():
            learn(a, b)
            outs.append(net(a).detach())
            features.append(net[0](a).detach())  # <- here
    """),
    plant("inside-a-function", growth("train() local 'outs'[0]", KEPT, ALL, "outs"))("""
        def train():
            outs = []
            for a, b in batches():
                learn(a, b)
                outs.append(net(a))  # <- here
            return len(outs)
        train()
    """),
    plant("nested-functions", growth("run() local 'kept'[0]", OUT, OUT, "kept"))("""
        def run(epochs):
            kept = []
            def epoch():
                for a, b in batches(4):
                    learn(a, b)
                    kept.append(net(a).detach())  # <- here
            for _ in range(epochs):
                epoch()
        run(4)
    """),
    plant("optimizer-state-that-grows", growth("update.state", 9000 * 4, 10000 * 4, "update.state"))("""
        class Remembers(torch.optim.SGD):
            def step(self, closure=None):
                for group in self.param_groups:
                    for one in group["params"]:
                        self.state[one].setdefault("all", []).append(one.grad.clone())  # <- here
                return super().step(closure)
        update = Remembers(net.parameters(), 0.1)
        for a, b in batches():
            update.zero_grad()
            F.cross_entropy(net(a), b).backward()
            update.step()
    """),
    plant("adversaries-kept", growth("made[0]", 32 * 64 * 4, 32 * 80 * 4, "made"))("""
        fake, judge = nn.Linear(8, 64), nn.Linear(64, 1)
        first, second = torch.optim.Adam(fake.parameters()), torch.optim.Adam(judge.parameters())
        made = []
        for a, b in batches():
            made.append(fake(torch.randn(32, 8)))  # <- here
            loss_d = F.softplus(-judge(a)).mean() + F.softplus(judge(made[-1].detach())).mean()
            second.zero_grad(); loss_d.backward(); second.step()
            loss_g = F.softplus(-judge(made[-1])).mean()
            first.zero_grad(); loss_g.backward(); first.step()
    """),
    plant("models-that-are-kept", growth("models[0]", 9000 * 4, 10000 * 4, "models"))("""
        import copy
        models = []
        for a, b in batches():
            learn(a, b)
            models.append(copy.deepcopy(net))  # <- here
    """),
    plant("state-dicts-that-are-kept", growth("saved[0]", 9000 * 4, 10000 * 4, "saved"))("""
        saved = []
        for a, b in batches():
            learn(a, b)
            saved.append({name: one.clone() for name, one in net.state_dict().items()})  # <- here
    """),
    plant("batches-that-are-kept", growth("kept[0]", 32 * 64 * 4, 32 * 64 * 4))("""
        kept = []
        for _ in range(12):
            a, b = torch.randn(32, 64), torch.randint(10, (32,))  # <- here
            kept.append(a)
            learn(a, b)
    """),
    plant("a-view-of-a-large-tensor", growth("firsts[0]", KEPT, KEPT, "firsts"))("""
        firsts = []
        for a, b in batches():
            learn(a, b)
            with torch.no_grad():
                hidden = net[0](a)  # <- here
            firsts.append(hidden[0])
    """),
    plant("a-leak-before-an-error", growth("kept[0]", KEPT, ALL, "kept"), raises="ValueError")("""
        kept = []
        for i, (a, b) in enumerate(batches()):
            learn(a, b)
            kept.append(net(a))  # <- here
            if i == 8:
                raise ValueError("enough")
    """),
    plant("gradients-that-are-kept", growth("slopes[0]", 9000 * 4, 10000 * 4, "slopes"))("""
        slopes = []
        for a, b in batches():
            opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            slopes.append([one.grad for one in net.parameters()])
            opt.step()
    """),
    plant("clones-of-gradients", growth("slopes[0]", 9000 * 4, 10000 * 4, "slopes"))("""
        slopes = []
        for a, b in batches():
            learn(a, b)
            slopes.append([one.grad.clone() for one in net.parameters()])  # <- here
    """),
    plant("late-in-a-function", growth("train() local 'kept'[", 1280, 1280))("""
        def train():
            kept = []
            for i, (a, b) in enumerate(batches(60)):
                learn(a, b)
                if i >= 30:
                    kept.append(net(a).detach())  # <- here
        train()
    """),
    plant("late-in-the-forward", growth("losses[", 20480, 81920))("""
        losses = []
        for i, (a, b) in enumerate(batches(80)):
            opt.zero_grad()
            out = net(a.repeat(16, 1))  # <- here
            out.sum().backward()
            opt.step()
            if i >= 40:
                losses.append(out)
    """),
    plant("a-bank-inside-the-model", growth("m.bank", 8192, 8192))("""
        class Mem(nn.Module):
            def __init__(self):
                super().__init__()
                self.l = nn.Linear(64, 64)
                self.bank = torch.zeros(0, 64)
            def forward(self, a):
                h = self.l(a)
                self.bank = torch.cat([self.bank, h.detach()])  # <- here
                return h
        m = Mem()
        for a, b in batches(20):
            m(a).sum().backward()
            m.zero_grad()
    """),
    plant("outputs-of-a-training-step", growth("mod.outputs[0]", 1280, 3840))("""
        class Module(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(64, 10); self.outputs = []
            def training_step(self, batch):
                a, b = batch
                out = self.net(a)  # <- here
                loss = F.cross_entropy(out, b)
                self.outputs.append({'loss': loss, 'out': out})
                return loss
        mod = Module()
        o = torch.optim.Adam(mod.parameters())
        for batch in batches(15):
            o.zero_grad(); mod.training_step(batch).backward(); o.step()
    """),
    plant("a-growing-data-set", growth("data", 8192, 8192))("""
        data = torch.zeros(0, 64)
        for a, b in batches(10):
            data = torch.cat([data, a])  # <- here
            learn(data, torch.randint(10, (len(data),)))
    """),
)
