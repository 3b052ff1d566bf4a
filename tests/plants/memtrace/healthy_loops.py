"""Loops that keep nothing: trainings, evaluations, models and optimizers of many kinds."""

from __future__ import annotations

from tests.plants.memtrace.loops import healthy

_CELLS = {
    "training": """
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
        """,
    "a-number-is-kept": """
        losses = []
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        """,
    "a-detached-scalar-is-kept": """
        losses = []
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        """,
    "a-running-total-of-numbers": """
        total = 0.0
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
            total += loss.item()
        """,
    "a-detached-running-total": """
        total = torch.zeros(())
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
            total += loss.detach()
        """,
    "accumulated-gradients": """
        for i, (a, b) in enumerate(batches(16)):
            loss = F.cross_entropy(net(a), b) / 4
            loss.backward()
            if i % 4 == 3:
                opt.step()
                opt.zero_grad()
        """,
    "gradients-set-to-zero": """
        for a, b in batches():
            opt.zero_grad(set_to_none=False)
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
        """,
    "evaluation-without-gradients": """
        net.eval()
        right = 0
        with torch.no_grad():
            for a, b in batches():
                right += (net(a).argmax(1) == b).sum()
        """,
    "evaluation-inference-mode": """
        net.eval()
        right = 0
        with torch.inference_mode():
            for a, b in batches():
                right += (net(a).argmax(1) == b).sum()
        """,
    "training-then-evaluation": """
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()

            with torch.no_grad():
                seen = net(a).argmax(1)
        best = None
        with torch.no_grad():
            for a, b in batches():
                best = net(a)
        """,
    "two-epochs-with-evaluation": """
        for epoch in range(3):
            for a, b in batches(6):
                learn(a, b)
            with torch.no_grad():
                for a, b in batches(4):
                    right = (net(a).argmax(1) == b).float().mean()
        """,
    "a-bounded-deque": """
        last = deque(maxlen=3)
        for a, b in batches(20):
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
            last.append(net(a).detach())
        """,
    "a-replay-buffer-with-a-limit": """
        replay = deque(maxlen=4)
        for a, b in batches(20):
            replay.append((a, b))
            for c, d in list(replay)[-2:]:
                learn(c, d)
        """,
    "the-best-model": """
        best, best_state = float("inf"), None
        for a, b in batches():
            loss = learn(a, b).item()
            if loss < best:
                best, best_state = loss, {name: one.clone() for name, one in net.state_dict().items()}
        """,
    "a-moving-average-of-weights": """
        import copy
        average = copy.deepcopy(net)
        for a, b in batches():
            learn(a, b)
            with torch.no_grad():
                for one, other in zip(average.parameters(), net.parameters()):
                    one.lerp_(other, 0.1)
        """,
    "a-scheduler": """
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
        for a, b in batches():
            learn(a, b)
            scheduler.step()
        """,
    "lengths-that-vary": """
        for size in (5, 40, 17, 33, 8, 60, 21, 2, 49, 12, 30, 7):
            learn(torch.randn(size, 64), torch.randint(10, (size,)))
        """,
    "batches-that-grow": """
        for size in range(4, 64, 4):
            learn(torch.randn(size, 64), torch.randint(10, (size,)))
        """,
    "batches-that-grow-by-hand": """
        for size in range(4, 64, 4):
            a, b = torch.randn(size, 64), torch.randint(10, (size,))
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
        """,
    "lengths-that-grow-without-gradients": """
        with torch.no_grad():
            for size in range(4, 64, 4):
                out = net(torch.randn(size, 64))
        """,
    "an-early-end": """
        for i, (a, b) in enumerate(batches()):
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
            if i == 6:
                break
        """,
    "a-warm-up": """
        for a, b in batches(3):
            net(a)
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
        """,
    "an-exception-that-is-caught": """
        for i, (a, b) in enumerate(batches()):
            try:
                learn(a[:, :60] if i % 4 == 1 else a, b)
            except RuntimeError:
                continue
        """,
    "adversaries": """
        fake, judge = nn.Linear(8, 64), nn.Linear(64, 1)
        first, second = torch.optim.Adam(fake.parameters()), torch.optim.Adam(judge.parameters())
        for a, b in batches():
            made = fake(torch.randn(32, 8))
            loss_d = F.softplus(-judge(a)).mean() + F.softplus(judge(made.detach())).mean()
            second.zero_grad(); loss_d.backward(); second.step()
            loss_g = F.softplus(-judge(made)).mean()
            first.zero_grad(); loss_g.backward(); first.step()
        """,
    "hidden-state-detached": """
        cell = nn.GRUCell(64, 32)
        h = torch.zeros(32, 32)
        for a, b in batches():
            h = cell(a, h.detach())
            loss = h.square().mean()
            loss.backward()
        """,
    "truncated-backpropagation": """
        cell = nn.GRUCell(64, 32)
        h, loss = torch.zeros(32, 32), 0
        for i, (a, b) in enumerate(batches(24)):
            h = cell(a, h)
            loss = loss + h.square().mean()
            if i % 4 == 3:
                loss.backward()
                h, loss = h.detach(), 0
        """,
    "a-key-value-cache-within-each-sequence": """
        head = nn.Linear(64, 64)
        with torch.no_grad():
            for sequence in range(4):
                keys = torch.zeros(1, 0, 64)
                for t in range(6):
                    keys = torch.cat([keys, head(torch.randn(1, 1, 64))], 1)
        """,
    "a-bounded-cache": """
        cache = {}
        def cached(key):
            if key not in cache:
                cache[key] = torch.randn(32, 64)
            return cache[key]
        for i in range(16):
            learn(cached(i % 3), y)
        """,
    "second-derivatives": """
        for a, b in batches():
            a = a.requires_grad_()
            out = net(a).sum()
            slope, = torch.autograd.grad(out, a, create_graph=True)
            opt.zero_grad()
            slope.square().mean().backward()
            opt.step()
        """,
    "a-graph-kept-for-one-step": """
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward(retain_graph=True)
            loss.backward()
            opt.step()
        """,
    "lbfgs": """
        few = torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=3)
        def closure():
            few.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss
        for _ in range(6):
            few.step(closure)
        """,
    "a-hook-that-is-removed": """
        for a, b in batches():
            kept = []
            handle = net[1].register_forward_hook(lambda m, i, o: kept.append(o.detach()))
            learn(a, b)
            handle.remove()
        """,
    "a-hook-that-keeps-the-last": """
        latest = {}
        net[1].register_forward_hook(lambda m, i, o: latest.update(hidden=o))
        for a, b in batches():
            learn(a, b)
        """,
    "a-loader": """
        data = torch.utils.data.TensorDataset(torch.randn(300, 64), torch.randint(10, (300,)))
        for epoch in range(2):
            for a, b in torch.utils.data.DataLoader(data, 32, shuffle=True):
                learn(a, b)
        """,
    "a-list-of-all-batches-beforehand": """
        made = list(batches(12))
        for a, b in made:
            learn(a, b)
        """,
    "models-made-one-after-another": """
        for width in (8, 16, 32, 64, 16, 8):
            model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
            update = torch.optim.Adam(model.parameters())
            for a, b in batches(4):
                update.zero_grad()
                F.cross_entropy(model(a), b).backward()
                update.step()
        """,
    "an-optimizer-that-is-lazy-in-its-state": """
        late = nn.Linear(64, 64)
        update = torch.optim.Adam([*net.parameters(), *late.parameters()])
        for i, (a, b) in enumerate(batches()):
            update.zero_grad()
            F.cross_entropy(net(late(a) if i > 5 else a), b).backward()
            update.step()
        """,
    "results-joined-at-the-end-in-numbers": """
        rows = []
        with torch.no_grad():
            for a, b in batches():
                rows += net(a).argmax(1).tolist()
        """,
    "a-preallocated-history": """
        history = torch.zeros(12, 32, 10)
        with torch.no_grad():
            for i, (a, b) in enumerate(batches()):
                history[i] = net(a)
        """,
    "checkpoints-in-a-function": """
        from torch.utils.checkpoint import checkpoint
        def forward(a):
            return net[2](checkpoint(lambda z: net[1](net[0](z)), a, use_reentrant=False))
        for a, b in batches():
            opt.zero_grad()
            F.cross_entropy(forward(a), b).backward()
            opt.step()
        """,
    "autocast": """
        for a, b in batches():
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
        """,
    "the-last-ten-of-thirty": """
        last = deque(maxlen=10)
        for a, b in batches(30):
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
            last.append(net(a).detach())
        """,
    "the-last-six-outputs": """
        last = deque(maxlen=6)
        for a, b in batches(40):
            out = net(a)
            F.cross_entropy(out, b).backward()
            opt.step(); opt.zero_grad()
            last.append(out.detach())
        """,
    "outputs-of-each-epoch": """
        for epoch in range(4):
            outs = []
            with torch.no_grad():
                for a, b in batches(8):
                    outs.append(net(a))
            score = torch.cat(outs).mean()
        """,
    "predictions": """
        preds = []
        with torch.no_grad():
            for a, b in batches(20):
                preds.append(net(a).argmax(1))
        """,
    "batches-that-grow-stacked": """
        for size in range(2, 40, 2):
            a = torch.stack([torch.randn(64) for _ in range(size)])
            net(a).sum().backward()
        """,
    "joined-with-itself": """
        for a, b in batches(12):
            c = torch.cat([a, a])
            net(c).sum().backward()
        """,
}
PLANTS = tuple(healthy(name)(cell) for name, cell in _CELLS.items())
