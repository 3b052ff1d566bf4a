"""Births in forward ops outside every module."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

CASES = (
    Case(
        name="loss_all_labels_ignored",
        setup="""
            model = nn.Linear(4, 3)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 4)
            labels = [torch.tensor([0, 1, 2, -100]), torch.tensor([1, 1, -100, -100]), torch.full((4,), -100)]
        """,
        cell="""
            for y in labels:
                loss = F.cross_entropy(model(x), y)  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="nll_loss_forward", module=None, step=2, rows=(), diagnosis=slugs.ALL_IGNORED),
    ),
    Case(
        name="loss_all_labels_ignored_own_index_in_2d",
        setup="""
            model = nn.Conv2d(1, 3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(2, 1, 3, 3)
            masks = [torch.randint(0, 3, (2, 3, 3)), torch.full((2, 3, 3), 255)]
        """,
        cell="""
            for target in masks:
                logits = model(x)
                loss = F.cross_entropy(  # <- here
                    logits,
                    target,
                    ignore_index=255,
                )
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="nll_loss2d_forward", module=None, step=1, rows=(), diagnosis=slugs.ALL_IGNORED),
    ),
    Case(
        name="loss_mean_over_an_empty_mask",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x, y = torch.randn(5, 3), torch.randn(5, 1)
            valid = [torch.tensor([1, 1, 0, 0, 1]) > 0, torch.tensor([0, 0, 0, 0, 0]) > 0]
        """,
        cell="""
            for keep in valid:
                error = (model(x) - y).abs().squeeze(1)
                loss = (error * keep).sum() / keep.sum()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, step=1, rows=(), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="loss_own_cross_entropy_log_of_softmax",
        setup="""
            def nll(logits, target):
                probs = torch.softmax(logits, -1)
                picked = probs.gather(1, target[:, None])
                return -torch.log(picked).mean()  # <- here
            model = nn.Linear(2, 2)
            with torch.no_grad():
                model.weight.copy_(torch.tensor([[50.0, 0.0], [0.0, 50.0]])); model.bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-4)
            x = torch.tensor([[0.1, 0.0], [0.0, 0.1], [4.0, -4.0]])
            targets = [torch.tensor([0, 1, 0]), torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1])]
        """,
        cell="""
            for target in targets:
                opt.zero_grad()
                loss = nll(model(x), target)
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=2, rows=(2,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="loss_infeasible_ctc",
        setup="""
            model = nn.Linear(3, 5)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(6, 2, 3)
            targets = torch.tensor([[1, 2, 0], [3, 3, 3]])
            input_lengths, target_lengths = torch.tensor([6, 4]), torch.tensor([2, 3])
        """,
        cell="""
            log_probs = model(x).log_softmax(-1)
            loss = F.ctc_loss(log_probs, targets, input_lengths, target_lengths)  # <- here
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="_ctc_loss", module=None, rows=(1,), diagnosis=slugs.CTC),
    ),
    Case(
        name="loss_kl_of_a_zero_probability",
        setup="""
            student = nn.Linear(3, 3)
            opt = torch.optim.SGD(student.parameters(), lr=0.1)
            x = torch.randn(4, 3)
            teacher = torch.softmax(torch.randn(4, 3), -1)
            teacher[2] = torch.tensor([0.0, 0.5, 0.5])
        """,
        cell="""
            q = torch.softmax(student(x), -1)
            loss = (teacher * (teacher.log() - q.log())).sum(-1).mean()  # <- here
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, rows=(2,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="loss_lambda",
        setup="""
            relative = lambda p, t: ((p - t) / t).abs().mean()  # <- here
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            batches = [(torch.randn(4, 2), torch.ones(4, 1)) for _ in range(4)]
            batches[2][1][0] = 0.0
        """,
        cell="""
            for x, y in batches:
                loss = relative(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, step=2, rows=(0,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="loss_nested_function_in_the_cell",
        setup="""
            model = nn.Linear(3, 2)
            opt = torch.optim.Adam(model.parameters())
            x = torch.randn(4, 3)
        """,
        cell="""
            def make_criterion(power):
                def distance(a, b):
                    gap = (a - b).sum(1)
                    return gap ** power  # <- here

                def criterion(out):
                    return distance(out, out.roll(1, 0)).mean()

                return criterion

            criterion = make_criterion(0.5)
            loss = criterion(model(x))
            loss.backward()
            opt.step()
        """,
        # Of differences around a ring some are negative: their root is NaN.
        truth=Expect(kind="nan", phase="loss", op="pow", module=None, rows=(1, 3)),
    ),
    Case(
        name="loss_second_statement_of_a_line",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [torch.rand(4, 3) for _ in range(4)]
            scale = [2.0, 1.0, 0.0, 1.0]
        """,
        cell="""
            for x, s in zip(batches, scale):
                opt.zero_grad(); out = model(x); loss = (out / s).pow(2).mean(); loss.backward(); opt.step()  # <- here
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, step=2, rows=(0, 1, 2, 3), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="loss_from_an_imported_file",
        files={
            "focal_helper.py": """
                import torch


                def focal(p, target, gamma=2.0):
                    pt = torch.where(target > 0, p, 1 - p)
                    weight = (1 - pt) ** gamma
                    return -(weight * pt.log()).mean()  # <- here
            """,
        },
        setup="""
            from focal_helper import focal
            model = nn.Linear(1, 1)
            with torch.no_grad():
                model.weight.fill_(1.0); model.bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-6)
            batches = [torch.tensor([[1.0], [-1.0]]), torch.tensor([[40.0], [2.0]])]
            target = torch.tensor([[0], [1]])
        """,
        cell="""
            for x in batches:
                loss = focal(torch.sigmoid(model(x)), target)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=1, rows=(0,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="loss_logit_of_one",
        setup="""
            model = nn.Sequential(nn.Linear(1, 1), nn.Sigmoid())
            with torch.no_grad():
                model[0].weight.fill_(1.0); model[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-4)
            x = torch.tensor([[0.5], [30.0], [-0.5]])
        """,
        cell="""
            p = model(x)
            z = torch.logit(p)  # <- here
            loss = z.mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="logit", module=None, rows=(1,)),
    ),
    Case(
        name="loss_normal_with_zero_scale",
        setup="""
            policy = nn.Linear(3, 2)
            with torch.no_grad():
                policy.weight[1].zero_(); policy.bias[1] = -1.0
            opt = torch.optim.SGD(policy.parameters(), lr=0.1)
            state, action = torch.randn(4, 3), torch.randn(4)
        """,
        cell="""
            mean, raw = policy(state).unbind(1)
            std = torch.relu(raw)
            log_prob = -0.5 * ((action - mean) / std).pow(2) - std.log()  # <- here
            loss = -log_prob.mean()
            loss.backward()
            opt.step()
        """,
        # Both infinities of the line are births: 1 / 0 and log 0.
        truth=Expect(
            kind="inf",
            phase="loss",
            op=frozenset({"div", "log"}),
            module=None,
            call=None,
            rows=(0, 1, 2, 3),
            diagnosis=frozenset({slugs.DIV_ZERO, slugs.LOG_ZERO}),
        ),
    ),
    Case(
        name="loss_exploding_exponent",
        setup="""
            vae = nn.Linear(2, 4)
            opt = torch.optim.SGD(vae.parameters(), lr=1e-3)
            batches = [torch.randn(3, 2) for _ in range(3)]
            with torch.no_grad():
                vae.weight.mul_(0.1)
            batches[1][2] = 5e4
        """,
        cell="""
            for x in batches:
                mu, log_var = vae(x).chunk(2, -1)
                kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(-1)  # <- here
                loss = kl.mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="exp", module=None, step=1, rows=(2,)),
    ),
    Case(
        name="loss_contrastive_temperature_zero_vector",
        setup="""
            encoder = nn.Linear(3, 3, bias=False)
            opt = torch.optim.SGD(encoder.parameters(), lr=0.01)
            views = [torch.randn(4, 3) for _ in range(3)]
            views[2][1] = 0.0
        """,
        cell="""
            for view in views:
                z = encoder(view)
                z = z / z.norm(dim=1, keepdim=True)  # <- here
                similarity = z @ z.T / 0.1
                loss = F.cross_entropy(similarity, torch.arange(4))
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, step=2, rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="loss_third_micro_batch_of_an_accumulation",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            stream = [(torch.rand(2, 3), torch.rand(2, 1) + 0.5) for _ in range(12)]
            stream[6][1][1] = 0.0
        """,
        cell="""
            for i, (x, y) in enumerate(stream):
                out = model(x)
                loss = ((out - y) / y).pow(2).mean() / 4  # <- here
                loss.backward()
                if i % 4 == 3:
                    opt.step()
                    opt.zero_grad()
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, step=1, backward=6, rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="loss_augmentation_outside_the_model",
        setup="""
            model = nn.Linear(4, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            batches = [torch.rand(3, 4) for _ in range(5)]
            batches[3][1] = 0.25
        """,
        cell="""
            for x in batches:
                out = model(x)
                target = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)  # <- here
                loss = F.mse_loss(out.expand(-1, 4), target)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(
            kind="nan", phase="loss", op="div", module=None, step=3, rows=(1,), diagnosis=frozenset({slugs.ZERO_VARIANCE, slugs.DIV_ZERO})
        ),
    ),
    Case(
        name="loss_in_a_criterion_module",
        setup="""
            class LogCosh(nn.Module):
                def forward(self, p, t):
                    return torch.log(torch.cosh(p - t)).mean()  # <- here
            criterion = LogCosh()
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.randn(3, 2)
            targets = [torch.randn(3, 1), torch.tensor([[0.0], [500.0], [1.0]])]
        """,
        cell="""
            for t in targets:
                loss = criterion(model(x), t)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # Inside a module, if not inside the model: the criterion is the root.
        truth=Expect(kind="inf", phase="forward", op="cosh", module="", step=1, rows=(1,)),
    ),
)
