"""Leaks that are hard to name: small beside others, compiled, in tuples, in gradients, in views."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, OUT, growth, plant

PLANTS = (
    plant(
        "layers-that-are-called-one-by-one",
        """
        layers = [nn.Linear(64, 64) for _ in range(3)]
        update = torch.optim.SGD([one for layer in layers for one in layer.parameters()], 0.01)
        kept = []
        for a, b in batches():
            for layer in layers:
                a = torch.tanh(layer(a))
            update.zero_grad(); a.sum().backward(); update.step()
            kept.append(a.detach().repeat(1, 4))  # <- here
        """,
        growth("kept[0]", 32 * 64 * 16, 32 * 64 * 16, "kept"),
    ),
    plant(
        "the-larger-of-two-with-a-small-one-beside-it",
        """
        first, second = [], []
        for i in range(12):
            a, b = torch.randn(32, 64), torch.randn(4)
            learn(a, y)
            with torch.no_grad():
                out = net(a).softmax(1)  # <- here
            first.append(out); second.append(b)
        """,
        growth("first[0]", OUT, OUT, "first"),
    ),
    plant(
        "many-small-lines-of-one-variable",
        """
        class Outputs(list): pass
        one, many = [], Outputs()
        for a, b in batches():
            learn(a, b)
            one.append(torch.ones(40, 64))
            many.append(torch.ones(32, 64))  # <- here
            many.append(torch.ones(31, 64))
        """,
        growth("many[0]", 63 * 64 * 4, 63 * 64 * 4, "many"),
    ),
    plant(
        "lists-of-lists",
        """
        outer = []
        for epoch in range(6):
            inner = []
            for a, b in batches(4):
                learn(a, b)
                inner.append(net[0](a).detach())  # <- here
            outer.append(inner)
        """,
        growth("outer[0][0]", KEPT, KEPT, "outer"),
    ),
    plant(
        "parameters-that-are-added-to-the-optimizer",
        """
        for a, b in batches():
            extra = nn.Parameter(torch.zeros(32, 64))  # <- here
            opt.add_param_group({"params": [extra]})
            learn(a + extra, b)
        """,
        growth("opt.param_groups[1]['params'][0]", 32 * 64 * 4, 32 * 64 * 4, "opt.param_groups"),
    ),
    plant(
        "slowly-in-a-long-loop",
        """
        kept = []
        for i, (a, b) in enumerate(batches(150)):
            learn(a, b)
            if i % 2:
                kept.append(net[0](a).detach())  # <- here
        """,
        growth("kept[0]", KEPT - 1000, KEPT, "kept"),
    ),
    plant(
        "features-with-their-graph-for-a-training-that-follows",
        """
        found = []
        for a, b in batches():
            found.append(net(a))  # <- here
        head = nn.Linear(10, 10)
        for one in found:
            head(one.detach()).sum().backward()
        """,
        growth("found[0]", KEPT, ALL, "no_grad"),
    ),
    plant(
        "without-a-model-among-what-goes",
        """
        w = torch.randn(64, 256, requires_grad=True)
        total = 0
        for i in range(20):
            total = total + (torch.randn(32, 64) @ w).tanh().sum()  # <- here
        """,
        growth("total.grad_fn", 32 * 256 * 4, 2 * 32 * 256 * 4, "no_grad"),
    ),
    plant(
        "a-compiled-function",
        """
        @torch.compile(backend="eager")
        def score(a, w):
            return (a @ w).tanh().sum()
        w = torch.randn(64, 256, requires_grad=True)
        losses = []
        for i in range(20):
            losses.append(score(torch.randn(32, 64), w))  # <- here
        """,
        growth("losses[0].grad_fn", 32 * 256 * 4, 2 * 32 * 256 * 4, "no_grad"),
    ),
    plant(
        "a-hidden-state-in-a-tuple",
        """
        lstm, head = nn.LSTM(64, 32), nn.Linear(32, 10)
        state = None
        for _ in range(14):
            out, state = lstm(torch.randn(5, 8, 64), state)  # <- here
            loss = head(out[-1]).sum()
        """,
        growth("state[", KEPT, 1 << 20, "`state` keeps the graph"),
    ),
    plant(
        "a-graph-in-each-gradient",
        """
        for a, b in batches():
            loss = F.cross_entropy(net(a), b)  # <- here
            loss.backward(create_graph=True)
        """,
        growth("net.", KEPT, 2 * ALL, "zero_grad"),
    ),
    plant(
        "functions-that-hold-outputs",
        """
        jobs = []
        for a, b in batches():
            out = net(a)  # <- here
            jobs.append(lambda out=out: out.sum())
        """,
        growth("jobs[0].<default out>", KEPT, ALL, "`jobs`"),
    ),
    plant(
        "every-fifth-output-of-the-forward-of-each-step",
        """
        kept = []
        for i, (a, b) in enumerate(batches(60)):
            opt.zero_grad()
            out = net[0](a)  # <- here
            net[2](net[1](out)).sum().backward()
            opt.step()
            if i % 5 == 4:
                kept.append(out.detach())
        """,
        growth("kept[", KEPT // 7, KEPT // 4, "kept"),
    ),
    plant(
        "every-seventh-output-with-its-graph",
        """
        kept = []
        def train():
            for i, (a, b) in enumerate(batches(60)):
                out = net(a)  # <- here
                if i % 7 == 6:
                    kept.append(out)
        train()
        """,
        growth("kept[", 1000, ALL // 6, "no_grad"),
    ),
    plant(
        "slices-of-a-large-tensor",
        """
        last = []
        for a, b in batches():
            learn(a, b)
            hidden = net[0](a)  # <- here
            last.append(hidden[-1].detach())
        """,
        growth("last[0]", KEPT, KEPT, "`.clone()`"),
    ),
    plant(
        "slices-of-an-array-on-a-tensor",
        """
        rows = []
        for a, b in batches():
            with torch.no_grad():
                hidden = net[0](a)  # <- here
            rows.append(hidden.numpy()[0])
        """,
        growth("rows[0]", KEPT, KEPT, "`.copy()`"),
    ),
    plant(
        "a-buffer-that-is-made-anew-larger-and-filled",
        """
        seen = torch.zeros(0, 64)
        for a, b in batches():
            learn(a, b)
            larger = torch.zeros(len(seen) + len(a), 64)  # <- here
            larger[:len(seen)] = seen
            larger[len(seen):] = a
            seen = larger
        """,
        growth("seen", 32 * 64 * 4, 32 * 64 * 4, "append to a list"),
    ),
    plant(
        "an-attentions-weights",
        """
        attend = nn.MultiheadAttention(64, 4, batch_first=True)
        maps = []
        for _ in range(12):
            words = torch.randn(8, 16, 64)
            out, weights = attend(words, words, words)  # <- here
            maps.append(weights.detach())
            out.sum().backward()
        """,
        growth("maps[0]", 8 * 16 * 16 * 4, 8 * 16 * 16 * 4, "maps"),
    ),
    plant(
        "a-penalty-with-the-graph-of-its-gradient",
        """
        penalties = []
        for a, b in batches():
            a = a.requires_grad_()
            out = net(a).sum()  # <- here
            slope, = torch.autograd.grad(out, a, create_graph=True)
            opt.zero_grad(); slope.square().sum().backward(retain_graph=True); opt.step()
            penalties.append(slope.square().sum())
        """,
        growth("penalties[0].grad_fn", KEPT, 2 * ALL, ".item()"),
    ),
    plant(
        "inputs-with-what-the-model-made-of-them",
        """
        memory = []
        for _ in range(14):
            seen = torch.randn(32, 64)
            out = net(seen)  # <- here
            memory.append((seen, out))
            opt.zero_grad(); out.square().sum().backward(retain_graph=True); opt.step()
        """,
        growth("memory[0][1]", KEPT, ALL, "detach"),
    ),
    plant(
        "a-compiled-model-whose-outputs-are-kept",
        """
        @torch.compile(backend="aot_eager")
        def forward(a):
            return net(a)
        outs = []
        for a, b in batches(14):
            out = forward(a)  # <- here
            outs.append(out)
        """,
        growth("outs[0].grad_fn", KEPT, ALL, "no_grad"),
    ),
)
