"""Leaks that begin late, come rarely, or stand in functions, optimizers and copies."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, growth, plant

PLANTS = (
    plant("inside-a-function", growth("train() local 'outs'[0]", KEPT, ALL, "outs"))("""
        def train():
            outs = []
            for a, b in batches():
                learn(a, b)
                outs.append(net(a))  # <- here
            return len(outs)
        train()
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
    plant("models-that-are-kept", growth("models[0]", 9000 * 4, 10000 * 4, "models"))("""
        import copy
        models = []
        for a, b in batches():
            learn(a, b)
            models.append(copy.deepcopy(net))  # <- here
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
)
