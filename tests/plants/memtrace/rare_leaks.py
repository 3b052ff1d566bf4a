"""Leaks that are hard to name: small beside others, compiled, in tuples, in gradients, in views."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, OUT, leak

PLANTS = (
    leak(
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
        "kept[0]",
        bytes_per_iteration=(32 * 64 * 16, 32 * 64 * 16),
        fix="kept",
    ),
    leak(
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
        "first[0]",
        bytes_per_iteration=(OUT, OUT),
        fix="first",
    ),
    leak(
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
        "many[0]",
        bytes_per_iteration=(63 * 64 * 4, 63 * 64 * 4),
        fix="many",
    ),
    leak(
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
        "outer[0][0]",
        bytes_per_iteration=(KEPT, KEPT),
        fix="outer",
    ),
    leak(
        "parameters-that-are-added-to-the-optimizer",
        """
        for a, b in batches():
            extra = nn.Parameter(torch.zeros(32, 64))  # <- here
            opt.add_param_group({"params": [extra]})
            learn(a + extra, b)
        """,
        "opt.param_groups[1]['params'][0]",
        bytes_per_iteration=(32 * 64 * 4, 32 * 64 * 4),
        fix="opt.param_groups",
    ),
    leak(
        "slowly-in-a-long-loop",
        """
        kept = []
        for i, (a, b) in enumerate(batches(150)):
            learn(a, b)
            if i % 2:
                kept.append(net[0](a).detach())  # <- here
        """,
        "kept[0]",
        bytes_per_iteration=(KEPT - 1000, KEPT),
        fix="kept",
    ),
    leak(
        "features-with-their-graph-for-a-training-that-follows",
        """
        found = []
        for a, b in batches():
            found.append(net(a))  # <- here
        head = nn.Linear(10, 10)
        for one in found:
            head(one.detach()).sum().backward()
        """,
        "found[0]",
        bytes_per_iteration=(KEPT, ALL),
        fix="no_grad",
    ),
    leak(
        "without-a-model-among-what-goes",
        """
        w = torch.randn(64, 256, requires_grad=True)
        total = 0
        for i in range(20):
            total = total + (torch.randn(32, 64) @ w).tanh().sum()  # <- here
        """,
        "total.grad_fn",
        bytes_per_iteration=(32 * 256 * 4, 2 * 32 * 256 * 4),
        fix="no_grad",
    ),
    leak(
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
        "losses[0].grad_fn",
        bytes_per_iteration=(32 * 256 * 4, 2 * 32 * 256 * 4),
        fix="no_grad",
    ),
    leak(
        "a-hidden-state-in-a-tuple",
        """
        lstm, head = nn.LSTM(64, 32), nn.Linear(32, 10)
        state = None
        for _ in range(14):
            out, state = lstm(torch.randn(5, 8, 64), state)  # <- here
            loss = head(out[-1]).sum()
        """,
        "state[",
        bytes_per_iteration=(KEPT, 1 << 20),
        fix="`state` keeps the graph",
    ),
    leak(
        "a-graph-in-each-gradient",
        """
        for a, b in batches():
            loss = F.cross_entropy(net(a), b)  # <- here
            loss.backward(create_graph=True)
        """,
        "net.",
        bytes_per_iteration=(KEPT, 2 * ALL),
        fix="zero_grad",
    ),
    leak(
        "functions-that-hold-outputs",
        """
        jobs = []
        for a, b in batches():
            out = net(a)  # <- here
            jobs.append(lambda out=out: out.sum())
        """,
        "jobs[0].<default out>",
        bytes_per_iteration=(KEPT, ALL),
        fix="`jobs`",
    ),
    leak(
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
        "kept[",
        bytes_per_iteration=(KEPT // 7, KEPT // 4),
        fix="kept",
    ),
    leak(
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
        "kept[",
        bytes_per_iteration=(1000, ALL // 6),
        fix="no_grad",
    ),
    leak(
        "slices-of-a-large-tensor",
        """
        last = []
        for a, b in batches():
            learn(a, b)
            hidden = net[0](a)  # <- here
            last.append(hidden[-1].detach())
        """,
        "last[0]",
        bytes_per_iteration=(KEPT, KEPT),
        fix="`.clone()`",
    ),
    leak(
        "slices-of-an-array-on-a-tensor",
        """
        rows = []
        for a, b in batches():
            with torch.no_grad():
                hidden = net[0](a)  # <- here
            rows.append(hidden.numpy()[0])
        """,
        "rows[0]",
        bytes_per_iteration=(KEPT, KEPT),
        fix="`.copy()`",
    ),
    leak(
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
        "seen",
        bytes_per_iteration=(32 * 64 * 4, 32 * 64 * 4),
        fix="append to a list",
    ),
    leak(
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
        "maps[0]",
        bytes_per_iteration=(8 * 16 * 16 * 4, 8 * 16 * 16 * 4),
        fix="maps",
    ),
    leak(
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
        "penalties[0].grad_fn",
        bytes_per_iteration=(KEPT, 2 * ALL),
        fix=".item()",
    ),
    leak(
        "inputs-with-what-the-model-made-of-them",
        """
        memory = []
        for _ in range(14):
            seen = torch.randn(32, 64)
            out = net(seen)  # <- here
            memory.append((seen, out))
            opt.zero_grad(); out.square().sum().backward(retain_graph=True); opt.step()
        """,
        "memory[0][1]",
        bytes_per_iteration=(KEPT, ALL),
        fix="detach",
    ),
    leak(
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
        "outs[0].grad_fn",
        bytes_per_iteration=(KEPT, ALL),
        fix="no_grad",
    ),
)
