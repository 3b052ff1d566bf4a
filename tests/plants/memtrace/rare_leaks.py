"""Leaks that are hard to name: small beside others, compiled, in tuples, in gradients, in views."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, OUT, growth, plant

PLANTS = (
    plant("layers-that-are-called-one-by-one", growth("kept[0]", 32 * 64 * 16, 32 * 64 * 16, "kept"))("""
        layers = [nn.Linear(64, 64) for _ in range(3)]
        update = torch.optim.SGD([one for layer in layers for one in layer.parameters()], 0.01)
        kept = []
        for a, b in batches():
            for layer in layers:
                a = torch.tanh(layer(a))
            update.zero_grad(); a.sum().backward(); update.step()
            kept.append(a.detach().repeat(1, 4))  # <- here
    """),
    plant("the-larger-of-two-with-a-small-one-beside-it", growth("first[0]", OUT, OUT, "first"))("""
        first, second = [], []
        for i in range(12):
            a, b = torch.randn(32, 64), torch.randn(4)
            learn(a, y)
            with torch.no_grad():
                out = net(a).softmax(1)  # <- here
            first.append(out); second.append(b)
    """),
    plant("many-small-lines-of-one-variable", growth("many[0]", 63 * 64 * 4, 63 * 64 * 4, "many"))("""
        class Outputs(list): pass
        one, many = [], Outputs()
        for a, b in batches():
            learn(a, b)
            one.append(torch.ones(40, 64))
            many.append(torch.ones(32, 64))  # <- here
            many.append(torch.ones(31, 64))
    """),
    plant("lists-of-lists", growth("outer[0][0]", KEPT, KEPT, "outer"))("""
        outer = []
        for epoch in range(6):
            inner = []
            for a, b in batches(4):
                learn(a, b)
                inner.append(net[0](a).detach())  # <- here
            outer.append(inner)
    """),
    plant(
        "parameters-that-are-added-to-the-optimizer",
        growth("opt.param_groups[1]['params'][0]", 32 * 64 * 4, 32 * 64 * 4, "opt.param_groups"),
    )("""
        for a, b in batches():
            extra = nn.Parameter(torch.zeros(32, 64))  # <- here
            opt.add_param_group({"params": [extra]})
            learn(a + extra, b)
    """),
    plant("slowly-in-a-long-loop", growth("kept[0]", KEPT - 1000, KEPT, "kept"))("""
        kept = []
        for i, (a, b) in enumerate(batches(150)):
            learn(a, b)
            if i % 2:
                kept.append(net[0](a).detach())  # <- here
    """),
    plant("features-with-their-graph-for-a-training-that-follows", growth("found[0]", KEPT, ALL, "no_grad"))("""
        found = []
        for a, b in batches():
            found.append(net(a))  # <- here
        head = nn.Linear(10, 10)
        for one in found:
            head(one.detach()).sum().backward()
    """),
    plant("without-a-model-among-what-goes", growth("total.grad_fn", 32 * 256 * 4, 2 * 32 * 256 * 4, "no_grad"))("""
        w = torch.randn(64, 256, requires_grad=True)
        total = 0
        for i in range(20):
            total = total + (torch.randn(32, 64) @ w).tanh().sum()  # <- here
    """),
    plant("a-compiled-function", growth("losses[0].grad_fn", 32 * 256 * 4, 2 * 32 * 256 * 4, "no_grad"))("""
        @torch.compile(backend="eager")
        def score(a, w):
            return (a @ w).tanh().sum()
        w = torch.randn(64, 256, requires_grad=True)
        losses = []
        for i in range(20):
            losses.append(score(torch.randn(32, 64), w))  # <- here
    """),
    plant("a-hidden-state-in-a-tuple", growth("state[", KEPT, 1 << 20, "`state` keeps the graph"))("""
        lstm, head = nn.LSTM(64, 32), nn.Linear(32, 10)
        state = None
        for _ in range(14):
            out, state = lstm(torch.randn(5, 8, 64), state)  # <- here
            loss = head(out[-1]).sum()
    """),
    plant("a-graph-in-each-gradient", growth("net.", KEPT, 2 * ALL, "zero_grad"))("""
        for a, b in batches():
            loss = F.cross_entropy(net(a), b)  # <- here
            loss.backward(create_graph=True)
    """),
    plant("functions-that-hold-outputs", growth("jobs[0].<default out>", KEPT, ALL, "`jobs`"))("""
        jobs = []
        for a, b in batches():
            out = net(a)  # <- here
            jobs.append(lambda out=out: out.sum())
    """),
    plant("every-fifth-output-of-the-forward-of-each-step", growth("kept[", KEPT // 7, KEPT // 4, "kept"))("""
        kept = []
        for i, (a, b) in enumerate(batches(60)):
            opt.zero_grad()
            out = net[0](a)  # <- here
            net[2](net[1](out)).sum().backward()
            opt.step()
            if i % 5 == 4:
                kept.append(out.detach())
    """),
    plant("every-seventh-output-with-its-graph", growth("kept[", 1000, ALL // 6, "no_grad"))("""
        kept = []
        def train():
            for i, (a, b) in enumerate(batches(60)):
                out = net(a)  # <- here
                if i % 7 == 6:
                    kept.append(out)
        train()
    """),
    plant("slices-of-a-large-tensor", growth("last[0]", KEPT, KEPT, "`.clone()`"))("""
        last = []
        for a, b in batches():
            learn(a, b)
            hidden = net[0](a)  # <- here
            last.append(hidden[-1].detach())
    """),
    plant("slices-of-an-array-on-a-tensor", growth("rows[0]", KEPT, KEPT, "`.copy()`"))("""
        rows = []
        for a, b in batches():
            with torch.no_grad():
                hidden = net[0](a)  # <- here
            rows.append(hidden.numpy()[0])
    """),
    plant("a-buffer-that-is-made-anew-larger-and-filled", growth("seen", 32 * 64 * 4, 32 * 64 * 4, "append to a list"))("""
        seen = torch.zeros(0, 64)
        for a, b in batches():
            learn(a, b)
            larger = torch.zeros(len(seen) + len(a), 64)  # <- here
            larger[:len(seen)] = seen
            larger[len(seen):] = a
            seen = larger
    """),
    plant("an-attentions-weights", growth("maps[0]", 8 * 16 * 16 * 4, 8 * 16 * 16 * 4, "maps"))("""
        attend = nn.MultiheadAttention(64, 4, batch_first=True)
        maps = []
        for _ in range(12):
            words = torch.randn(8, 16, 64)
            out, weights = attend(words, words, words)  # <- here
            maps.append(weights.detach())
            out.sum().backward()
    """),
    plant("a-penalty-with-the-graph-of-its-gradient", growth("penalties[0].grad_fn", KEPT, 2 * ALL, ".item()"))("""
        penalties = []
        for a, b in batches():
            a = a.requires_grad_()
            out = net(a).sum()  # <- here
            slope, = torch.autograd.grad(out, a, create_graph=True)
            opt.zero_grad(); slope.square().sum().backward(retain_graph=True); opt.step()
            penalties.append(slope.square().sum())
    """),
    plant("inputs-with-what-the-model-made-of-them", growth("memory[0][1]", KEPT, ALL, "detach"))("""
        memory = []
        for _ in range(14):
            seen = torch.randn(32, 64)
            out = net(seen)  # <- here
            memory.append((seen, out))
            opt.zero_grad(); out.square().sum().backward(retain_graph=True); opt.step()
    """),
    plant("a-compiled-model-whose-outputs-are-kept", growth("outs[0].grad_fn", KEPT, ALL, "no_grad"))("""
        @torch.compile(backend="aot_eager")
        def forward(a):
            return net(a)
        outs = []
        for a, b in batches(14):
            out = forward(a)  # <- here
            outs.append(out)
    """),
)
